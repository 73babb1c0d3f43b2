"""Rotations, differentiable: of queries, of keys, of both in one tensor."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.flash_attn import arguments
from cuflash.flash_attn.rotation import rotate, table_rows
from cuflash.torch import batched_grad
from cuflash.torch.tracing import by_operations


class _Rotate(torch.autograd.Function):
    """`rotate`, whose gradient is the rotation back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        cos: Any,
        sin: Any,
        interleaved: bool,
        inverse: bool,
        inplace: bool,
    ) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.undo = interleaved, not inverse
        if inplace:
            ctx.mark_dirty(x)
        return rotate(
            x, cos, sin, interleaved, inverse, x if inplace else None
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        def back(dout: Any, cos: Any, sin: Any) -> Any:
            interleaved, inverse = ctx.undo
            return (_rotated(dout, cos, sin, interleaved, inverse, False),)

        (dx,) = batched_grad.call(back, *gradients, *ctx.saved_tensors)
        return dx, None, None, None, None, None


class _RotateParts(torch.autograd.Function):
    """Rotate x[:, :, i] in place, for each i in `at`, by its own rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        at: tuple[Any, ...],
        interleaved: bool,
        inverse: bool,
        *rows: Any,
    ) -> Any:
        ctx.save_for_backward(*rows)
        ctx.undo = at, interleaved, not inverse
        ctx.mark_dirty(x)
        for i, cos, sin in zip(at, rows[::2], rows[1::2], strict=True):
            part = x[:, :, i]
            rotate(part, cos, sin, interleaved, inverse, part)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        def back(dout: Any, *rows: Any) -> Any:
            # Autograd may hand the same gradient to others.
            return (_rotated_parts(dout.clone(), *ctx.undo, *rows),)

        (dx,) = batched_grad.call(back, *gradients, *ctx.saved_tensors)
        return dx, None, None, None, *[None] * len(ctx.saved_tensors)


def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:
    """Rotate the first `rotary_dim` columns of queries or keys.

    Differentiable in `x`. Arithmetic is float32 (float64 for float64 `x`),
    rounded once.

    Parameters
    ----------
    x : Tensor, (batch, seqlen, nheads, headdim)
        With `cu_seqlens`, (total, nheads, headdim).
    cos, sin : Tensor, (seqlen_rotary, rotary_dim / 2)
        The rows of a position's angles, in any floating-point dtype.
    interleaved : bool, optional
        Whether pair i is the columns (2i, 2i + 1), else
        (i, i + rotary_dim / 2).
    inplace : bool, optional
        Whether to change `x` itself.
    seqlen_offsets : int or Tensor, (batch,), optional
        The position of each sequence's first token. Those in a tensor are
        not checked: a token past the end of the tables is not rotated.
    cu_seqlens : Tensor, (batch + 1,), optional
        Integers: the offset of each sequence's first token, then the end of
        the last. Each sequence counts its positions from its first token.
    max_seqlen : int, optional
        The length of the longest sequence, with `cu_seqlens`.

    Returns
    -------
    Tensor, like `x`
        `x` itself with `inplace`.

    Examples
    --------
    >>> import torch
    >>> from cuflash.flash_attn.layers.rotary import apply_rotary_emb
    >>> x = torch.randn(2, 16, 4, 8)
    >>> angles = torch.outer(torch.arange(16), 100.0 ** -torch.arange(4))
    >>> apply_rotary_emb(x, angles.cos(), angles.sin()).shape
    torch.Size([2, 16, 4, 8])
    """
    rows = table_rows(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return _rotated(x, *rows, interleaved, False, inplace)


def apply_rotary_emb_qkv_(
    qkv: Any,
    cos: Any,
    sin: Any,
    cos_k: Any = None,
    sin_k: Any = None,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:
    """Rotate the queries and keys in `qkv`, in place.

    Parameters
    ----------
    qkv : Tensor, (batch, seqlen, 3, nheads, headdim)
        With `num_heads_q`, (batch, seqlen, num_heads_q + 2 * nheads_k,
        headdim).
    cos, sin : Tensor, (seqlen_rotary, rotary_dim / 2)
    cos_k, sin_k : Tensor, optional
        Those of keys, if they are others.
    interleaved, seqlen_offsets
        As in `apply_rotary_emb`.
    num_heads_q : int, optional

    Returns
    -------
    Tensor
        `qkv` itself.
    """
    q, k, _ = arguments.heads(qkv, num_heads_q)
    at: tuple[Any, ...] = (0, 1)
    if num_heads_q is not None:
        end = num_heads_q + k.shape[2]
        at = (slice(0, num_heads_q), slice(num_heads_q, end))
    keys = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    rows = (
        *table_rows(q, cos, sin, seqlen_offsets),
        *table_rows(k, *keys, seqlen_offsets),
    )
    return _rotated_parts(qkv, at, interleaved, False, *rows)


def apply_rotary_emb_kv_(
    kv: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
) -> Any:
    """Rotate the keys in `kv`, (batch, seqlen, 2, nheads, headdim), in place.

    Other parameters as in `apply_rotary_emb`. Returns `kv`.
    """
    k, _ = arguments.parts(
        "kv", kv, "(batch, seqlen, 2, nheads, headdim)", "2"
    )
    rows = table_rows(k, cos, sin, seqlen_offsets)
    return _rotated_parts(kv, (0,), interleaved, False, *rows)


def _rotated(
    x: Any, cos: Any, sin: Any, interleaved: bool, inverse: bool, inplace: bool
) -> Any:
    """x rotated, differentiably."""
    if not by_operations():
        return _Rotate.apply(x, cos, sin, interleaved, inverse, inplace)
    rotated = rotate(x, cos, sin, interleaved, inverse)
    return x.copy_(rotated) if inplace else rotated


def _rotated_parts(
    x: Any, at: tuple[Any, ...], interleaved: bool, inverse: bool, *rows: Any
) -> Any:
    """x, of which parts are rotated in place, differentiably."""
    if not by_operations():
        return _RotateParts.apply(x, at, interleaved, inverse, *rows)
    for i, cos, sin in zip(at, rows[::2], rows[1::2], strict=True):
        part = x[:, :, i]
        part.copy_(rotate(part, cos, sin, interleaved, inverse))
    return x
