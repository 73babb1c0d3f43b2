"""One recipe, one launcher, one choice of struct.

The first three read the code: a second one is noticed where it is written.
"""

import re
from pathlib import Path

import pytest

import cuflash
from cuflash.launch import structs
from cuflash.launch.directions import DIRECTIONS

PACKAGE = Path(cuflash.__file__).parent
# It replays what launch/run.py launched while it recorded.
REPLAYS = "jax/recording.py"
# They describe structs, choose among them, and tell kernels which theirs is.
MAY_NAME = re.compile(r"launch/(structs|parts)\.py|plans/\w+\.py")


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
