"""One recipe, one launcher, one choice of struct.

The first three read the code: a second one is noticed where it is written.
"""

import re
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash.launch import structs
from cuflash.launch.directions import DIRECTIONS
from cuflash.plans.arguments import parts_of
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.problem import Problem, Tangents

PACKAGE = Path(cuflash.__file__).parent
# It replays what launch/run.py launched while it recorded.
REPLAYS = "jax/recording.py"
# They describe structs, choose among them, and tell kernels which theirs is.
MAY_NAME = re.compile(r"launch/(structs|parts)\.py|plans/arguments\.py")
NAMES = {x: n for n, x in vars(structs).items() if isinstance(x, np.dtype)}
# Whose plans are of five families.
TYPES = [
    ("sm_90a", "bfloat16"),
    ("sm_80", "float16"),
    ("sm_80", "float32"),
    ("sm_80", "float64"),
    ("sm_75", "float32"),
]
SIZES = 1, 512, 512, 2, 2, 64, 64, 1.0
DERIVATIVES = "jvp", "double_backward"


def modules(pattern):
    """The modules whose text has a pattern, once for each time."""
    return [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for _ in re.findall(pattern, path.read_text(encoding="utf-8"))
    ]


def test_there_is_one_recipe():
    assert modules(r"\bclass \w*Recipe") == ["launch/recipe.py"]


def test_one_module_launches():
    assert {*modules(r"backend\.launch\(")} == {"launch/run.py", REPLAYS}


def test_structs_are_chosen_in_one_place():
    named = modules(r"\b[A-Z]\w*Arguments\b")
    assert not [name for name in named if not MAY_NAME.match(name)]


@pytest.mark.parametrize(("direction", "parts"), structs._CHOSEN)
def test_each_pointer_has_a_source(direction, parts):
    """A pointer that no direction knows would be null."""
    kind = structs.chosen(direction, {*parts})
    row = DIRECTIONS[direction]
    row.check(structs.pointers_of(kind), row.writes, row.between)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward", *DERIVATIVES])
@pytest.mark.parametrize(("arch", "dtype"), TYPES)
def test_plans_name_the_struct_of_the_call(arch, dtype, direction, sink):
    """Or the arrays that it begins with, of a kernel that reads no more."""
    moves = {"tangents": Tangents(("q",))} if direction in DERIVATIVES else {}
    problem = Problem(direction, dtype, *SIZES, sink=sink, **moves)
    decided = plan(problem, device_of_arch(arch))
    kind = structs.chosen(direction, parts_of(problem, decided.record))
    known = {NAMES[kind]}
    if "arrays" in kind.names:
        known.add(NAMES[kind["arrays"]])
    named = [dict(x.constants).get("Arguments") for x in decided.kernels]
    assert {x for x in named if x} <= known
