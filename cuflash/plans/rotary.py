"""The kernel of `apply_rotary`, which has no tiles."""

from __future__ import annotations

from cuflash.problem import Problem

from .kernel import Family, KernelPlan, Launch, Plan
from .rounding import ceil_div
from .steps import ELEMENTS, ROW_THREADS, element, num_rows

_INDICES = {"int32": "int", "int64": "i64", None: "int"}


def rotary_plan(problem: Problem) -> Plan:
    """A warp for each row of x."""
    rotary = problem.rotary
    assert rotary is not None
    kernel = KernelPlan(
        file="prepare/rotary.cu",
        entry="rotary",
        constants=(
            ("Element", element(problem)),
            ("Table", ELEMENTS.get(rotary.tables, rotary.tables)),
            ("Index", _INDICES[rotary.positions]),
            ("NUM_THREADS", ROW_THREADS),
        ),
        threads=ROW_THREADS,
        shared_bytes=0,
    )
    blocks = ceil_div(num_rows(problem) * 32, ROW_THREADS)
    family: Family = "mma" if element(problem) == problem.dtype else "simt"
    return Plan(problem, family, None, (Launch(kernel, blocks),))
