"""Rotation of queries and keys by their positions, differentiable.

On a CUDA device by the kernel of `cuflash.apply_rotary`; on a CPU, and in
compiled models, by PyTorch's operations.
"""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.flash_attn import arguments
from cuflash.torch.request import kernel_backend
from cuflash.torch.rotary import rotated_columns
from cuflash.torch.rotary_kernel import apply_rotary as apply_rotary_by_kernel


def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Any:
    """Rotate `x`, without recording the operation for a gradient.

    Parameters
    ----------
    conjugate : bool, optional
        Whether to rotate back, which is the gradient.
    x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
        As in `layers.rotary.apply_rotary_emb`.

    Returns
    -------
    Tensor, like `x`
        `x` itself with `inplace`.
    """
    with torch.no_grad():
        rows = table_rows(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
        return rotate(x, *rows, interleaved, conjugate, x if inplace else None)


def table_rows(
    x: Any,
    cos: Any,
    sin: Any,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: Any = None,
) -> tuple[Any, Any]:
    """The cosines and sines of each token: (..., seqlen, 1, pairs).

    Tokens past the end of the tables are not rotated.
    """
    layout = arguments.ROWS if cu_seqlens is None else arguments.PACKED
    arguments.tensor("x", x, layout)
    _check_tables(x, cos, sin)
    if cu_seqlens is None:
        length = x.shape[1]
        if not isinstance(seqlen_offsets, torch.Tensor):
            _check_length(length, "x", seqlen_offsets, cos)
            rows = slice(seqlen_offsets, seqlen_offsets + length)
            return cos[rows, None], sin[rows, None]
        arguments.one_each("seqlen_offsets", seqlen_offsets, x.shape[0])
        token = torch.arange(length, device=x.device)
        positions = seqlen_offsets[:, None] + token
    else:
        if max_seqlen is None:
            raise ValueRangeError(
                "cu_seqlens is given without max_seqlen, expected max_seqlen "
                "too: the length of the longest sequence"
            )
        offset = seqlen_offsets
        if isinstance(offset, torch.Tensor):
            arguments.one_each(
                "seqlen_offsets", offset, cu_seqlens.shape[0] - 1
            )
        else:
            _check_length(max_seqlen, "max_seqlen", offset, cos)
        positions = _packed_positions(x.shape[0], offset, cu_seqlens)
    inside = ((0 <= positions) & (positions < cos.shape[0]))[..., None, None]
    positions = positions.clamp(0, cos.shape[0] - 1)
    return (
        torch.where(inside, cos[positions][..., None, :], 1),
        torch.where(inside, sin[positions][..., None, :], 0),
    )


def rotate(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool,
    inverse: bool,
    out: Any = None,
) -> Any:
    """Each pair (a, b) becomes (a cos - b sin, a sin + b cos).

    In float32 (float64 for float64 `x`), rounded once. `out` may be `x`.
    """
    pairs = cos.shape[-1]
    backend = kernel_backend(x)
    if backend is not None and pairs:
        return _by_kernel(
            backend, x, cos, sin, interleaved, inverse, out is not None
        )
    rotated = rotated_columns(x, cos, sin, interleaved, inverse)
    if out is None:
        return torch.cat((rotated, x[..., 2 * pairs :]), -1)
    out[..., : 2 * pairs] = rotated
    return out


def _by_kernel(
    backend: Any,
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool,
    inverse: bool,
    inplace: bool,
) -> Any:
    own = torch.float64 if x.dtype == torch.float64 else torch.float32
    kind = cos.dtype if cos.dtype in (own, x.dtype) else own
    cos_rows, sin_rows = (
        table.to(kind).resolve_neg().flatten(0, -2) for table in (cos, sin)
    )
    positions = None
    if cos.ndim == 4:  # the rows of each sequence, one after another
        rows = torch.arange(len(cos_rows), device=x.device)
        positions = rows.view(cos.shape[:2])
    x4 = x if x.ndim == 4 else x[None]
    tables = cos_rows, sin_rows, positions
    out = apply_rotary_by_kernel(
        backend, x4, *tables, interleaved, inverse, inplace
    )
    if inplace:
        return x
    return out if x.ndim == 4 else out[0]


def _packed_positions(total: int, offset: Any, cu_seqlens: Any) -> Any:
    """The position of each token in its sequence, plus the offset."""
    token = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    # Tokens after the last sequence belong to none.
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    if isinstance(offset, torch.Tensor):
        offset = offset[sequence]
    return token - cu_seqlens[sequence] + offset


def _check_tables(x: Any, cos: Any, sin: Any) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        arguments.tensor(name, table, "(seqlen_rotary, rotary_dim / 2)")
        if not table.is_floating_point():
            raise DTypeError(
                f"{name} has dtype {table.dtype}, expected a floating-point "
                "dtype"
            )
        if table.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires grad, but only x has a gradient: pass "
                f"{name}.detach()"
            )
    if arguments.sizes_are_tensors():
        return
    if cos.shape != sin.shape:
        raise ShapeError(
            f"sin has shape {tuple(sin.shape)}, expected "
            f"{tuple(cos.shape)} as cos"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(
            f"cos has shape {tuple(cos.shape)}, expected at most "
            f"{x.shape[-1] // 2} columns: x has headdim {x.shape[-1]}, and a "
            "column rotates two of its"
        )


def _check_length(length: int, what: str, offset: int, cos: Any) -> None:
    if arguments.sizes_are_tensors():
        return
    if not 0 <= offset <= len(cos) - length:
        raise ValueRangeError(
            f"seqlen_offsets is {offset} and {what} has {length} tokens, "
            f"expected at most {len(cos)} in sum: the rows of cos"
        )
