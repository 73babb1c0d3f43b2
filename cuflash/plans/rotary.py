"""The kernel of `apply_rotary`, which has no tiles."""

from __future__ import annotations

from cuflash.request.problem import Problem

from .kernel import Plan
from .rounding import ceil_div
from .steps import ELEMENTS, element, plan_of_one, row_kernel

_MOST_WARPS = 8
_INDICES = {"int32": "int", "int64": "i64", None: "int"}


def rotary_plan(problem: Problem) -> Plan:
    """A warp for each head of a token."""
    rotary = problem.rotary
    assert rotary is not None
    warps = min(_MOST_WARPS, 1 << max(problem.num_heads_q, 1).bit_length() - 1)
    kernel = row_kernel(
        "prepare/rotary.cu",
        "rotary",
        ("Element", element(problem)),
        ("Table", ELEMENTS.get(rotary.tables, rotary.tables)),
        ("Index", _INDICES[rotary.positions]),
        threads=32 * warps,
    )
    tokens = problem.batch * problem.seqlen_q
    blocks = tokens * ceil_div(problem.num_heads_q, warps)
    return plan_of_one(problem, kernel, blocks)
