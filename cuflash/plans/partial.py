"""The kernels that combine partial results, which have no tiles."""

from __future__ import annotations

from cuflash.request.problem import Problem

from .kernel import KernelPlan, Plan
from .rounding import ceil_div
from .steps import ELEMENTS, ROW_THREADS, element, plan_of_one


def _row_vector(problem: Problem) -> int:
    """The elements that a lane loads at once, of up to 16 bytes in all."""
    most = 2 if problem.dtype == "float64" else 4
    return most if problem.head_dim_v % most == 0 else 1


def merge_rows_plan(
    problem: Problem, first: str, result: str, count: int
) -> Plan:
    """A warp for each head of a token.

    Parameters
    ----------
    problem : Problem
        Of ``"merge"``.
    first, result : str
        The dtypes of the array that others are merged into and of the
        result: the problem's, or that of its lse.
    count : int
        How many others.
    """
    vector = _row_vector(problem)
    heads = max(problem.num_heads_q, 1)
    warps = min(ROW_THREADS // 32, 1 << heads.bit_length() - 1)
    blocks = problem.batch * problem.seqlen_q * ceil_div(heads, warps)
    return _plan(
        problem, "merge_rows", (first, result), count, vector, blocks,
        32 * warps,
    )  # fmt: skip


def add_rows_plan(
    problem: Problem, first: str, result: str, count: int
) -> Plan:
    """A block for up to ROW_THREADS * vector columns of a token.

    Parameters are those of `merge_rows_plan`.
    """
    vector = _row_vector(problem)
    columns = problem.num_heads_q * problem.head_dim_v
    parts = ceil_div(columns, ROW_THREADS * vector)
    blocks = problem.batch * problem.seqlen_q * parts
    return _plan(problem, "add_rows", (first, result), count, vector, blocks)


def _plan(
    problem: Problem,
    entry: str,
    dtypes: tuple[str, str],
    count: int,
    vector: int,
    blocks: int,
    threads: int = ROW_THREADS,
) -> Plan:
    first, result = (ELEMENTS.get(x, x) for x in dtypes)
    kernel = KernelPlan(
        file=f"partial/{entry}.cu",
        entry=entry,
        constants=(
            ("Element", element(problem)),
            ("First", first),
            ("Result", result),
            ("COUNT", count),
            ("VECTOR", vector),
            ("NUM_THREADS", threads),
        ),
        threads=threads,
    )
    return plan_of_one(problem, kernel, blocks)
