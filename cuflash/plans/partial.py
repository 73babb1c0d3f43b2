"""The kernels that combine partial results, which have no tiles."""

from __future__ import annotations

from cuflash.request.problem import Problem

from .kernel import Plan
from .rounding import ceil_div
from .steps import ELEMENTS, ROW_THREADS, element, plan_of_one, row_kernel


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
    heads = max(problem.num_heads_q, 1)
    warps = min(ROW_THREADS // 32, 1 << heads.bit_length() - 1)
    blocks = problem.batch * problem.seqlen_q * ceil_div(heads, warps)
    dtypes = first, result
    return _plan(problem, "merge_rows", dtypes, count, blocks, 32 * warps)


def add_rows_plan(
    problem: Problem, first: str, result: str, count: int
) -> Plan:
    """A block for the columns of a token that its threads load at once.

    Parameters are those of `merge_rows_plan`.
    """
    columns = problem.num_heads_q * problem.head_dim_v
    parts = ceil_div(columns, ROW_THREADS * _row_vector(problem))
    blocks = problem.batch * problem.seqlen_q * parts
    return _plan(problem, "add_rows", (first, result), count, blocks)


def _plan(
    problem: Problem,
    entry: str,
    dtypes: tuple[str, str],
    count: int,
    blocks: int,
    threads: int = ROW_THREADS,
) -> Plan:
    first, result = (ELEMENTS.get(x, x) for x in dtypes)
    kernel = row_kernel(
        f"partial/{entry}.cu",
        entry,
        ("Element", element(problem)),
        ("First", first),
        ("Result", result),
        ("COUNT", count),
        ("VECTOR", _row_vector(problem)),
        threads=threads,
    )
    return plan_of_one(problem, kernel, blocks)
