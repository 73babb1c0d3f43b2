"""FlashAttention-3's `qv`: queries of values, whose products scores add.

Scores are Q K^T + Qv V^T, as of queries and keys of all these columns.
"""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import DTypeError, ShapeError, UnsupportedError
from cuflash.request.validate.shapes import MAX_HEAD_DIM
from cuflash.torch import forward_kvcache
from cuflash.torch.tracing import is_traced


def _check(q: Any, qv: Any, v: Any) -> None:
    """Check `qv` beside q and values; nothing is written before."""
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != expected:
        raise ShapeError(
            f"qv has shape {tuple(qv.shape)}, expected {expected}: as q, with"
            " the columns of v"
        )
    if qv.dtype != q.dtype:
        raise DTypeError(
            f"qv has dtype {qv.dtype}, expected that of q, {q.dtype}"
        )
    columns = q.shape[-1] + v.shape[-1]
    if columns > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"q and qv have {columns} columns together, expected at most"
            f" {MAX_HEAD_DIM}"
        )


def concatenated(q: Any, k: Any, qv: Any, v: Any) -> tuple[Any, Any]:
    """Queries and keys, with as many columns as both."""
    _check(q, qv, v)
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def over_caches(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    qv: Any,
    offsets: Any = None,
    **options: Any,
) -> Any:
    """`forward_kvcache` with `qv`.

    A cache whose rows hold a value and then the rest of its key is read in
    place. Others are copied. `offsets` are those of packed new tokens.
    """
    if "rotary_cos" in options:
        raise UnsupportedError(
            "rotary_cos is given with qv, expected None: the columns of q and "
            "qv are rotated as one; rotate q and k before the call"
        )
    _check(q, qv, v_cache)
    new = {x: options[x] for x in ("k_new", "v_new") if x in options}
    rows = _values_first(k_cache, v_cache)
    if rows is not None:
        if new:
            del options["v_new"]
            options["k_new"] = torch.cat((new["v_new"], new["k_new"]), -1)
        queries, columns = torch.cat((qv, q), -1), v_cache.shape[-1]
        return forward_kvcache(queries, rows, head_dim_v=columns, **options)
    if new:
        forward_kvcache(q, k_cache, v_cache, **options)  # appends them
        counts: Any = new["k_new"].shape[1]
        if new["k_new"].ndim == 3:
            counts = offsets[1:] - offsets[:-1]
        options = {x: y for x, y in options.items() if x not in new}
        options["cache_seqlens"] = options["cache_seqlens"] + counts
    queries, keys = concatenated(q, k_cache, qv, v_cache)
    return forward_kvcache(queries, keys, v_cache, **options)


def _values_first(k: Any, v: Any) -> Any:
    """The rows of which v is the first columns and k the others, if any."""
    if is_traced(v, k, v):
        return None
    columns = v.shape[-1]
    one_memory = (
        k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and k.data_ptr() == v.data_ptr() + columns * v.element_size()
        and k.shape[:-1] == v.shape[:-1]
        and k.stride() == v.stride()
        and k.dtype == v.dtype
        and k.stride(-1) == 1
    )
    if not one_memory:
        return None
    shape = (*v.shape[:-1], columns + k.shape[-1])
    return v.as_strided(shape, v.stride(), v.storage_offset())
