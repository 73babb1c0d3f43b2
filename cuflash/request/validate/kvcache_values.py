"""Lengths, slots and pages of `cuflash.forward_kvcache`, read on the host."""

from __future__ import annotations

import numpy as np

from cuflash.errors import ValueRangeError
from cuflash.request.options import INDICES
from cuflash.request.problem import Call, KVCache, Problem
from cuflash.request.validate.host_values import check_offsets, first, on_host
from cuflash.request.validate.kvcache import room


def values(call: Call) -> None:
    """Raise ValueRangeError if a length, a slot or a page is invalid.

    It reads the arrays, so it waits for the device.
    """
    p = call.problem
    cache = p.kvcache
    assert cache is not None
    given = {
        name: on_host(array)
        for name, array in call.options.items()
        if name in INDICES
    }
    queries = np.full(p.batch, p.seqlen_q)
    if cache.packed_queries:
        offsets = given["cu_seqlens_q"]
        check_offsets(
            "cu_seqlens_q", offsets.tolist(), cache.total_q, p.seqlen_q
        )
        queries = np.diff(offsets)
    new = queries if cache.packed_new else np.full(p.batch, cache.seqlen_new)
    lengths = given.get("cache_seqlens")
    if lengths is None:
        lengths = np.full(p.batch, call.cache_seqlens)
    before = np.broadcast_to(lengths, p.batch).astype(np.int64)
    _check_lengths(before, new, p, cache.lengths)
    for name, most, why in (
        ("cache_batch_idx", cache.slots - 1, "the slots of k_cache"),
        ("cache_leftpad", 2**31 - 1, "it counts tokens"),
    ):
        if name in given:
            at = first((given[name] < 0) | (given[name] > most))
            if at is not None:
                raise ValueRangeError(
                    f"{name}[{at[0]}] is {given[name][at]}, expected 0 to "
                    f"{most}: {why}"
                )
    if cache.page_size is not None:
        _check_pages(given["page_table"], before + new, cache)
    _check_rows_apart(given, before, new, cache)
    if cache.rotary is not None:
        ordered = p.causal or p.window != (None, None)
        turned = queries if ordered else np.minimum(queries, 1)
        last = before + np.maximum(new, turned)
        at = first((last > cache.rotary.num_positions) & (new + turned > 0))
        if at is not None:
            rows = cache.rotary.num_positions
            raise ValueRangeError(
                f"{_name(at[0], cache.lengths)} is {before[at]}, and tokens "
                f"up to position {last[at] - 1} are rotated, expected "
                f"positions of 0 to {rows - 1}: rotary_cos has {rows} rows"
            )


def _check_lengths(
    before: np.ndarray, new: np.ndarray, p: Problem, is_array: bool
) -> None:
    at = first((before < 0) | (before + new > p.seqlen_k))
    if at is not None:
        raise ValueRangeError(
            f"{_name(at[0], is_array)} is {before[at]}, expected "
            f"{room(p, int(new[at]))}"
        )


def _check_pages(
    table: np.ndarray, lengths: np.ndarray, cache: KVCache
) -> None:
    """Check the pages that hold tokens; others are never read."""
    assert cache.page_size is not None
    starts = np.arange(cache.max_pages) * cache.page_size
    used = starts < lengths[:, None]
    at = first(used & ((table < 0) | (table >= cache.slots)))
    if at is not None:
        raise ValueRangeError(
            f"page_table[{at[0]}, {at[1]}] is {table[at]}, expected 0 to "
            f"{cache.slots - 1}, the pages of k_cache: sequence {at[0]} has "
            f"{lengths[at[0]]} tokens, and a page holds {cache.page_size}"
        )


def _check_rows_apart(
    given: dict[str, np.ndarray],
    before: np.ndarray,
    new: np.ndarray,
    cache: KVCache,
) -> None:
    """Check that no two tokens are appended to one row of the caches."""
    sequence = np.repeat(np.arange(len(new)), new)
    # Tokens are numbered in their sequences; new ones lie end to end.
    token = np.arange(len(sequence)) + np.repeat(
        before - (np.cumsum(new) - new), new
    )
    if cache.page_size is not None:
        name, kind, row = "page_table", "page", token % cache.page_size
        place = [sequence, token // cache.page_size]
    elif "cache_batch_idx" in given:
        name, kind, row = "cache_batch_idx", "slot", token
        place = [sequence]
    else:
        return  # each sequence has a slot of its own
    slot = given[name][tuple(place)]
    order = np.lexsort((row, slot))
    same = (np.diff(slot[order]) == 0) & (np.diff(row[order]) == 0)
    at = first(same)
    if at is None:
        return
    a, b = order[at[0]], order[at[0] + 1]
    one, other = (
        f"{name}[{', '.join(str(x[i]) for x in place)}]" for i in (a, b)
    )
    raise ValueRangeError(
        f"{other} is {slot[b]}, as is {one}, and token {token[b]} of sequence "
        f"{sequence[b]} is appended to the row of token {token[a]} of "
        f"sequence {sequence[a]}, expected a row for each: give one of them "
        f"another {kind}"
    )


def _name(sequence: int, is_array: bool) -> str:
    return f"cache_seqlens[{sequence}]" if is_array else "cache_seqlens"
