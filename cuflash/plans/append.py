"""The kernel before attention over a KV cache: prepare/append_kvcache.cu."""

from __future__ import annotations

from cuflash.request.problem import ALIGNMENT, Problem

from .kernel import Constant, Launch
from .rounding import ceil_div, round_up
from .steps import (
    ELEMENTS,
    ROW_THREADS,
    arguments,
    element,
    element_bytes,
    row_kernel,
)


def append_launches(
    problem: Problem, constants: tuple[Constant, ...]
) -> tuple[Launch, ...]:
    """Appends new tokens, rotates queries; nothing if there is no need.

    `constants` are those of a KV cache (common/constants.cuh).
    """
    cache = problem.kvcache
    assert cache is not None
    rotary = cache.rotary
    new_tokens = problem.batch * cache.seqlen_new
    if cache.packed_new:
        new_tokens = cache.total_q
    rows = (1 if cache.latent else 2) * new_tokens * problem.num_heads_kv
    if rotary or cache.packed_queries:
        rows += cache.total_q * problem.num_heads_q
    if not rows:
        return ()
    table = rotary.tables if rotary else problem.lse_dtype
    kernel = row_kernel(
        "prepare/append_kvcache.cu",
        "append_kvcache",
        ("Element", element(problem)),
        ("Table", ELEMENTS.get(table, table)),
        ("HAS_NEW", cache.seqlen_new > 0),
        ("ROTARY", rotary is not None),
        ("ORDERED", problem.causal or "window" in problem.options),
        arguments(problem, "decode"),
        *constants,
    )
    return (Launch(kernel, ceil_div(rows * 32, ROW_THREADS)),)


def width_of_rotated(problem: Problem) -> int:
    """Elements of a row of rotated queries: rows are aligned to 16 bytes."""
    return round_up(problem.head_dim, ALIGNMENT // element_bytes(problem))
