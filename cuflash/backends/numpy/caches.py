"""What calls on NumPy arrays make of caches and new tokens first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.backends.numpy.arrays import dtype_of, options
from cuflash.reference import kvcache
from cuflash.reference.packed import spans
from cuflash.reference.rotary import apply_rotary as apply_rotary_to
from cuflash.request.problem import Call

# q, k and options of some sequences, with heads first.
Sequences = Iterator[tuple[np.ndarray, np.ndarray, dict[str, Any]]]


def rotated(call: Call, options: dict) -> dict[str, np.ndarray]:
    """q, rotated and rounded to its dtype as kernels do, and k_new, rotated.

    The reference does not round q. Takes the tables out of `options`.
    """
    p, given = call.problem, call.given
    assert p.kvcache is not None and p.kvcache.rotary is not None
    tables = options.pop("rotary_cos"), options.pop("rotary_sin")
    lengths = np.broadcast_to(options["cache_seqlens"], p.batch)
    ordered = p.causal or p.window != (None, None)
    found = {}
    for name in ("q", "k_new"):
        x = given[name]
        # Of each sequence, how far its tokens are from the first.
        if x.ndim == 4:
            steps, first = np.arange(x.shape[1]), lengths[:, None]
        else:
            steps, first = _steps(options["cu_seqlens_q"], lengths, len(x))
        if name == "q" and not ordered:
            steps = np.zeros_like(steps)
        found[name] = apply_rotary_to(
            x, *tables, first + steps, p.kvcache.rotary.interleaved
        )
    found["q"] = found["q"].astype(dtype_of(call), order="C")
    return found


def _steps(
    cu_seqlens: np.ndarray, lengths: np.ndarray, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each packed token's index in its sequence, and its sequence's length.

    Both are 0 for tokens of no sequence.
    """
    steps, first = np.zeros((2, total), np.int64)
    for number, rows, _ in spans(cu_seqlens, cu_seqlens, total, total):
        steps[rows] = np.arange(rows.stop - rows.start)
        first[rows] = lengths[number]
    return steps, first


def as_float8(array: np.ndarray) -> np.ndarray:
    """A cache, as float8 if the user passed its bytes."""
    if array.dtype != np.uint8:
        return array
    return array.view(ml_dtypes.float8_e4m3fn)


def sequences(call: Call) -> Sequences:
    """Yield each sequence; keys that the call will append are among its own.

    For functions of pairs: `call` has some.
    """
    p, asked = call.problem, dict(call.options)
    assert p.kvcache is not None
    given = dict(call.given)
    if p.kvcache.rotary:
        asked.setdefault("cache_seqlens", call.cache_seqlens)
        given |= rotated(call, asked)
    q, k_new, cache = given["q"], given.get("k_new"), given["k_cache"]
    table, slots = asked.get("page_table"), asked.get("cache_batch_idx")
    lengths, leftpad = (
        np.broadcast_to(asked.get(name, absent), p.batch)
        for name, absent in (
            ("cache_seqlens", call.cache_seqlens), ("cache_leftpad", 0)
        )
    )  # fmt: skip
    slots = np.arange(p.batch) if slots is None else slots
    at = kvcache.Addresses(cache.shape[1], slots, table)
    offsets = asked.get("cu_seqlens_q")
    real, stored, scale = p.lse_dtype, as_float8(cache), asked.get("k_scale")
    of_call = options(call)
    for part in kvcache.sequences(q, k_new, lengths, leftpad, offsets):
        old = part._replace(stop=part.before)
        keys = kvcache.cached(stored, at, old, scale)
        if k_new is not None:
            new = np.asarray(k_new[part.new], keys.dtype)
            keys = np.concatenate(
                [keys, new[max(part.first - part.before, 0) :]]
            )
        by_group = (
            kvcache.by_group(x, p.num_heads_kv)
            for x in (q[part.queries], keys)
        )
        rows, columns = (x[None].astype(real) for x in by_group)
        own = dict(of_call)
        own["head_indices"] = own["head_indices"]._replace(batch=part.number)
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"][part.number, None]
        yield rows, columns, own
