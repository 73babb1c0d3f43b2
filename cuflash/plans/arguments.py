"""Which argument struct a call has: its parts, and the name that they make.

A plan's kernels name the struct in which the launcher passes a call's arrays;
`launch.structs` composes it.
"""

from __future__ import annotations

from collections.abc import Collection

from cuflash.request.problem import FEW_STATES, Problem
from cuflash.request.readout import READOUT_GRADIENTS, READOUTS

from .expression import has_expression
from .record import Family

# What a call's struct may have beside the arrays of its direction, and the
# word for it in the struct's name.
_WORDS = {
    "maps": "Wgmma",
    "split": "Split",
    "options": "Options",
    "expression": "Expression",
    "many": "Many",
}


def parts_of(p: Problem, family: Family) -> set[str]:
    """What the struct of a problem's calls has, by a family's kernels.

    "maps" (TensorMaps), "split" (keys), "options", "expression" (a user's own
    functions, in place of options), and "many" (states to merge). Structs
    of forward calls have max_score with options, so a call that returns it
    has these.
    """
    is_own = has_expression(p)
    has = {
        "options": (p.options or p.return_max_score) and not is_own,
        "expression": is_own,
        "maps": family.loads_by_tma,
        "split": family.splits_keys,
        "many": p.num_states > FEW_STATES,
    }
    return {name for name, value in has.items() if value}


def struct_name(direction: str, parts: Collection[str]) -> str:
    """The name of a direction's struct that has these parts."""
    own = _WORDS["expression"] * ("expression" in parts)
    if direction == "kvcache":  # it has all others, or no use for them
        return f"ForwardKVCache{own}Arguments"
    if direction in (*READOUTS, *READOUT_GRADIENTS):  # they share them
        direction = "readout"
    words = [word for part, word in _WORDS.items() if part in parts]
    if direction == "backward" and not words:  # the arrays, and dlse
        words = ["Plain"]
    prefix = "".join(map(str.capitalize, direction.split("_")))
    return f"{prefix}{''.join(words)}Arguments"
