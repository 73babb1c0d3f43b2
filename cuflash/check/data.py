"""Inputs in which each key and each query counts.

Random numbers forgive: with equal weights over normal numbers, one key more
or less is noise. Here

- ``"coded"``: scores are small, so weights are about equal; key j's value is
  one number in one column, which few keys share, and query i's gradient too;
- ``"peaked"``: query i has most of its weight on one key, another for each;
- ``"rising"``: scores grow along the keys, so that each tile has a new
  maximum.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cuflash.check import options
from cuflash.check.calls import Call, Shape

NUMPY = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
PAGE = 16
PEAK = 6.0  # the largest score of "peaked" and "rising"


def inputs(call: Call) -> dict[str, np.ndarray]:
    """q, k, v and dout of a call, and for derivatives q_dot, k_dot, v_dot."""
    s = call.shape
    random = np.random.default_rng([s.seqlen_q, s.seqlen_k, s.head_dim])
    made = {"coded": _coded, "peaked": _peaked, "rising": _rising}
    arrays = made[call.values](random, s)
    if call.direction in ("jvp", "double_backward"):
        for name in "qkv":
            shape = arrays[name].shape
            arrays[f"{name}_dot"] = random.standard_normal(shape)
    if options.PACKED in call.options:
        arrays = {x: y[0] for x, y in arrays.items()}
    return {x: y.astype(NUMPY[call.dtype]) for x, y in arrays.items()}


def _shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = (s.batch, s.seqlen_q, s.heads), (
        s.batch, s.seqlen_k, s.heads_kv,
    )  # fmt: skip
    return {
        "q": (*queries, s.head_dim),
        "k": (*keys, s.head_dim),
        "v": (*keys, s.head_dim_v),
        "dout": (*queries, s.head_dim_v),
    }


def _coded(random: Any, s: Shape) -> dict[str, Any]:
    shapes = _shapes(s)
    arrays = {x: random.standard_normal(shapes[x]) / 4 for x in "qk"}
    return arrays | {x: _codes(shapes[x]) for x in ("v", "dout")}


def _codes(shape: tuple[int, ...]) -> Any:
    """One number a row, in a column of its own, of either sign."""
    batch, tokens, heads, columns = shape
    rows = np.arange(batch * tokens * heads).reshape(batch, tokens, heads)
    token = np.arange(tokens)[None, :, None]
    column = (token + rows % 3) % columns
    codes = (1 + rows % 8 / 8) * (1 - 2 * (rows % 2))
    return codes[..., None] * (np.arange(columns) == column[..., None])


def _peaked(random: Any, s: Shape) -> dict[str, Any]:
    shapes = _shapes(s)
    keys = np.sign(random.standard_normal(shapes["k"]))
    # Bottom right, as causal masks are aligned; a few keys before.
    i = np.arange(s.seqlen_q)
    peak = np.clip(i + s.seqlen_k - s.seqlen_q - i % 5, 0, s.seqlen_k - 1)
    queries = np.repeat(keys[:, peak], s.heads // s.heads_kv, axis=2)
    arrays = {"q": PEAK * s.head_dim**-0.5 * queries, "k": keys}
    normal = {x: random.standard_normal(shapes[x]) for x in ("v", "dout")}
    return arrays | normal


def _rising(random: Any, s: Shape) -> dict[str, Any]:
    shapes = _shapes(s)
    signs = np.sign(random.standard_normal(s.head_dim))
    heights = (1 + np.arange(s.seqlen_k)) / s.seqlen_k
    k = np.broadcast_to(heights[:, None, None] * signs, shapes["k"])
    q = PEAK * s.head_dim**-0.5 * np.broadcast_to(signs, shapes["q"])
    normal = {x: random.standard_normal(shapes[x]) for x in ("v", "dout")}
    return {"q": q, "k": k, **normal}


# ---- Caches ----


def cache(call: Call) -> dict[str, Any]:
    """The keyword arguments of `forward_kvcache`, but for q.

    What no sequence has is NaN. ``"contiguous"``: slots in another order;
    ``"paged"``: pages too; ``"float8"``: pages of bytes; ``"new"``: tokens
    that the call appends.
    """
    s, arrays = call.shape, inputs(call)
    lengths = _lengths(s)
    if call.cache == "new":
        return _growing(s, arrays, lengths)
    if call.cache == "contiguous":
        slots = np.roll(np.arange(s.batch), 1).astype(np.int32)
        given = {f"{x}_cache": _gaps(arrays[x], lengths, slots) for x in "kv"}
        return {**given, "cache_seqlens": lengths, "cache_batch_idx": slots}
    pages = -(-s.seqlen_k // PAGE)
    order = np.random.default_rng(pages).permutation(s.batch * pages)
    table = order.reshape(s.batch, pages).astype(np.int32)
    given = {f"{x}_cache": _paged(arrays[x], lengths, table) for x in "kv"}
    given |= {"cache_seqlens": lengths, "page_table": table}
    if call.cache == "float8":
        for x in "kv":
            stored = given[f"{x}_cache"].astype(ml_dtypes.float8_e4m3fn)
            given[f"{x}_cache"] = stored.view(np.uint8)
            # Powers of two, by which nothing is rounded.
            scales = 2.0 ** -np.arange(1, 1 + s.heads_kv)
            given[f"{x}_scale"] = scales.astype(np.float32)
    return given


def _lengths(s: Shape) -> np.ndarray:
    """Of each sequence: all tokens, one less, and few."""
    few = max(s.seqlen_q, s.seqlen_k // 3)
    lengths = [s.seqlen_k, s.seqlen_k - 1, few]
    return np.array(lengths[: s.batch], np.int32)


def _gaps(array: Any, lengths: Any, slots: Any) -> Any:
    found = np.full_like(array, np.nan)
    for x, length, slot in zip(array, lengths, slots, strict=True):
        found[slot, :length] = x[:length]
    return found


def _paged(array: Any, lengths: Any, table: Any) -> Any:
    room = (table.size, PAGE, *array.shape[2:])
    found = np.full(room, np.nan, array.dtype)
    for x, length, pages in zip(array, lengths, table, strict=True):
        t = np.arange(length)
        found[pages[t // PAGE], t % PAGE] = x[:length]
    return found


def _growing(s: Shape, arrays: Any, lengths: Any) -> dict[str, Any]:
    before = lengths - s.seqlen_q
    slots = np.arange(s.batch)
    given = {f"{x}_cache": _gaps(arrays[x], before, slots) for x in "kv"}
    for x in "kv":
        parts = zip(arrays[x], before, strict=True)
        new = [a[n : n + s.seqlen_q] for a, n in parts]
        given[f"{x}_new"] = np.stack(new)
    return {**given, "cache_seqlens": before}


def sequences(call: Call) -> list[dict[str, np.ndarray]]:
    """q, k and v of each sequence of a cache, in float64."""
    s, arrays = call.shape, inputs(call)
    wide = {}
    for x in "qkv":
        array = arrays[x]
        if call.cache == "float8" and x != "q":
            stored = array.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            scales = 2.0 ** -np.arange(1, 1 + s.heads_kv)
            array = stored * scales[:, None]
        wide[x] = array.astype(np.float64)
    lengths = _lengths(s)
    return [
        {"q": wide["q"][b : b + 1]} | {x: wide[x][b : b + 1, :n] for x in "kv"}
        for b, n in enumerate(lengths)
    ]


def rotary_tables(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the tokens' angles, in the call's dtype."""
    s = call.shape
    angles = np.outer(np.arange(s.seqlen_q), 0.5 ** np.arange(s.head_dim // 2))
    kind = NUMPY[call.dtype]
    return np.cos(angles).astype(kind), np.sin(angles).astype(kind)
