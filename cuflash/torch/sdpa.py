"""torch's `scaled_dot_product_attention`: its signature, layout and masks."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import DTypeError, ShapeError, ValueRangeError
from cuflash.request import checks

from .attention import attend
from .checks import check_tensors

_BOTH = (
    "attn_mask and is_causal are both given, expected one of them as torch's "
    "own function does (put the causal mask into attn_mask)"
)
_LAYOUT = "layout is (..., heads, seqlen, head_dim)"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as `torch.nn.functional.scaled_dot_product_attention`.

    It takes that function's place in a model that is not to be edited, and
    calls `cuflash.torch.attention`. Differentiable twice in `query`, `key`,
    `value` and a floating-point `attn_mask`.

    Parameters
    ----------
    query : Tensor, (..., num_heads_q, seqlen_q, head_dim)
        With any number of axes before. Of a 3-D tensor the first axis counts
        as heads, a 2-D tensor is one head.
    key, value : Tensor, (..., num_heads_kv, seqlen_k, head_dim)
        `value` may have another head dimension. Axes of size 1 before seqlen
        are broadcast, and so are those of `query`.
    attn_mask : Tensor, optional
        Broadcast to (..., num_heads_q, seqlen_q, seqlen_k). bool: True where
        a query sees a key. float32, or the dtype of `query`: added to the
        scores; it may require grad. `causal_upper_left` and
        `causal_lower_right` of torch.nn.attention.bias take no memory.
    dropout_p : float, optional
        The probability with which a weight is dropped. Whether the model
        trains is not known here: pass 0.0 if it does not.
    is_causal : bool, optional
        Whether query i sees the keys j <= i. This is aligned at the first
        query and key, and ``causal=True`` of `attention` at the last ones.
    scale : float, optional
        Multiplies the scores; by default head_dim ** -0.5.
    enable_gqa : bool, optional
        Whether num_heads_q may be a multiple of num_heads_kv.

    Returns
    -------
    Tensor, (..., num_heads_q, seqlen_q, head_dim_v)
        With the strides of a transposed (..., seqlen_q, num_heads_q,
        head_dim_v).

    Raises
    ------
    ShapeError
        If shapes do not fit, or head counts differ without `enable_gqa`.
    DTypeError
        If dtypes differ, or `attn_mask` has none of those above.
    ValueRangeError
        If `attn_mask` and `is_causal` are both given.
    CuflashError
        In the other cases in which `attention` raises.

    Notes
    -----
    A query that sees no key has out 0 and no gradient, as by torch's math
    backend. Under autocast the tensors take its dtype, but for float64
    tensors and a float32 `attn_mask`.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> query, key, value = torch.randn(3, 2, 4, 16, 8)
    >>> ours, theirs = (
    ...     f(query, key, value, is_causal=True)
    ...     for f in (
    ...         cuflash.torch.scaled_dot_product_attention,
    ...         torch.nn.functional.scaled_dot_product_attention,
    ...     )
    ... )
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    at_end = False
    # By name: to import its module takes as long as a compiler's.
    if type(attn_mask).__name__ == "CausalBias":
        at_end = _is_at_end(attn_mask, query, key, is_causal)
        attn_mask, is_causal = None, True
    given = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        given["attn_mask"] = attn_mask
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_tensors(given)
    numbers = dropout_p, is_causal, at_end, scale, enable_gqa
    if not (
        (compiling or torch._C._is_any_autocast_enabled())
        and torch.is_autocast_enabled(query.device.type)
    ):
        return _attention(query, key, value, attn_mask, *numbers)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device)
    given = {name: _cast(name, x, dtype) for name, x in given.items()}
    query, key, value = (given[x] for x in ("query", "key", "value"))
    with torch.autocast(device, enabled=False):
        return _attention(query, key, value, given.get("attn_mask"), *numbers)


def _is_at_end(
    bias: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> bool:
    """Whether a CausalBias is aligned at the last query and key."""
    if is_causal:
        raise ValueRangeError(_BOTH)
    sizes = bias.seq_len_q, bias.seq_len_kv
    expected = query.shape[-2], key.shape[-2]
    if sizes != expected:
        raise ShapeError(
            f"attn_mask is a causal bias of {sizes}, expected {expected}: "
            "seqlen of query and key"
        )
    return bias.variant.name == "LOWER_RIGHT"


def _cast(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of a tensor: float64 and integers stay."""
    if not x.is_floating_point() or x.dtype is torch.float64:
        return x
    if name == "attn_mask" and x.dtype is torch.float32:
        return x  # it is added to float32 scores
    return x.to(dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    at_end: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """The function without autocast; `at_end` is causal's alignment."""
    alike = _are_alike(query, key, value)
    if attn_mask is not None or not alike:
        _check(query, key, value, attn_mask, is_causal)
    options: dict[str, Any] = {}
    causal = False
    drops_all = dropout_p == 1  # `attention` takes less
    if dropout_p and not drops_all:
        options["dropout"] = checks.dropout("dropout_p", dropout_p)
    if is_causal:
        seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
        if at_end or seqlen_q <= seqlen_k:
            causal = True
        else:
            options["window"] = (None, seqlen_q - seqlen_k)
        if not at_end and seqlen_q < seqlen_k:  # no query sees later keys
            key, value = key[..., :seqlen_q, :], value[..., :seqlen_q, :]
    if not alike:
        query, key, value = _with_equal_axes(query, key, value, enable_gqa)
    rank = query.ndim
    arrays: dict[str, torch.Tensor] = {}
    if attn_mask is not None:
        name = "mask" if attn_mask.dtype is torch.bool else "bias"
        arrays[name] = _readable(attn_mask, query, key)
    if rank > 4:
        lead = query.shape[:-3]
        query, key, value = (
            x.flatten(0, rank - 4) for x in (query, key, value)
        )
    elif rank == 3:  # heads after seqlen
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    out = attend(
        query, key, value, False, (scale, causal, None, None, None, None),
        given=options | arrays, arrays=arrays, by_heads=rank > 3,
    )  # fmt: skip
    if drops_all:
        out = out * 0.0
    if rank == 3:
        out = out.transpose(0, 1)
    return out.unflatten(0, lead) if rank > 4 else out


def _are_alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether they have four axes each, and sizes and dtypes that fit.

    Most do: then neither `_check` nor `_with_equal_axes` has a thing to do.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    if not query.dtype is key.dtype is value.dtype:
        return False
    batch, heads, _, head_dim = query.shape
    batch_k, heads_k, seqlen_k, head_dim_k = key.shape
    batch_v, heads_v, seqlen_v, _ = value.shape
    return (
        batch == batch_k == batch_v and heads == heads_k == heads_v
        and seqlen_k == seqlen_v and head_dim == head_dim_k
    )  # fmt: skip


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Check what `attention` would complain of in its own words."""
    if attn_mask is not None and is_causal:
        raise ValueRangeError(_BOTH)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, expected at least 2 "
                f"axes: {_LAYOUT}"
            )
        if x.dtype is not query.dtype:
            raise DTypeError(
                f"{name} has dtype {x.dtype}, expected {query.dtype} as "
                f"query (pass {name}.to(query.dtype))"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            f"key has head_dim {key.shape[-1]}, expected {query.shape[-1]} "
            f"as query (query {tuple(query.shape)}, key {tuple(key.shape)}; "
            f"{_LAYOUT})"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError(
            f"value has seqlen {value.shape[-2]}, expected {key.shape[-2]} "
            f"as key (key {tuple(key.shape)}, value {tuple(value.shape)}; "
            f"{_LAYOUT})"
        )


def _with_equal_axes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
) -> tuple[torch.Tensor, ...]:
    """The tensors with the same axes before heads, and heads that fit."""
    given = (query, key, value)
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return given
    rank = max(x.ndim for x in given)
    query, key, value = (x[(None,) * (rank - x.ndim)] for x in given)
    heads_q, heads_k, heads_v = (x.shape[-3] for x in (query, key, value))
    if enable_gqa:
        fits = all(n > 0 and heads_q % n == 0 for n in (heads_k, heads_v))
        if fits and heads_k != heads_v:  # each shares by itself
            key = key.repeat_interleave(heads_q // heads_k, -3)
            value = value.repeat_interleave(heads_q // heads_v, -3)
            heads_k = heads_v = heads_q
    else:  # a key head that all share need not be repeated
        most = max(heads_q, heads_k, heads_v)
        fits = all(n in (1, most) for n in (heads_q, heads_k, heads_v))
        heads_q, heads_k = most, max(heads_k, heads_v)
        heads_v = heads_k
    try:
        lead = torch.broadcast_shapes(
            *(x.shape[:-3] for x in (query, key, value))
        )
    except RuntimeError:
        fits = False
    if not fits:
        words = ", ".join(
            f"{name} {tuple(x.shape)}"
            for name, x in zip(("query", "key", "value"), given, strict=True)
        )
        raise ShapeError(
            "query, key and value have other axes before seqlen, expected "
            "equal sizes, or 1 where one is for all (pass enable_gqa=True "
            "where the heads of query are a multiple of key heads; "
            f"{words}; {_LAYOUT})"
        )
    return tuple(
        x.expand(*lead, n, *x.shape[-2:])
        for x, n in zip(
            (query, key, value), (heads_q, heads_k, heads_v), strict=True
        )
    )


def _readable(
    attn_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """The mask as `attention` takes it: its dtype, and four axes or fewer."""
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise DTypeError(
            f"attn_mask has dtype {attn_mask.dtype}, expected torch.bool, "
            f"torch.float32 or {query.dtype} as query (pass attn_mask != 0, "
            "or attn_mask.to(query.dtype))"
        )
    if attn_mask.dtype is torch.float32 and query.dtype is torch.float64:
        attn_mask = attn_mask.to(query.dtype)
    whole = (*query.shape[:-1], key.shape[-2])
    missing = len(whole) - attn_mask.ndim
    if missing < 0 or any(
        n not in (1, size)
        for n, size in zip(attn_mask.shape, whole[missing:], strict=True)
    ):
        raise ShapeError(
            f"attn_mask has shape {tuple(attn_mask.shape)}, expected one "
            f"that broadcasts to {whole}: (..., heads, seqlen_q, seqlen_k)"
        )
    if attn_mask.ndim < 2:
        return attn_mask.expand(1, whole[-1])
    if attn_mask.ndim < 4 or len(whole) < 5:
        return attn_mask
    if any(n != 1 for n in attn_mask.shape[:-3]):  # as query becomes a batch
        attn_mask = attn_mask.expand(*whole[:-3], *attn_mask.shape[-3:])
    return attn_mask.flatten(0, attn_mask.ndim - 4)
