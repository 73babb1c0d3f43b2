"""`apply_rotary` on torch tensors, differentiable.

On a CUDA device by the kernel of `cuflash.apply_rotary`. On the CPU, compiled
and under transforms by torch's own operations, which compilers fuse with
their neighbours.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from cuflash.api import foreign_names
from cuflash.errors import ShapeError
from cuflash.request.problem import Call
from cuflash.request.validate import rotary as validate

from . import request, rotary_kernel
from .checks import check_tensors
from .dtypes import to_numpy
from .request import kernel_backend, reads_values
from .signature import checked_shapes
from .tracing import PLAIN


@foreign_names.our_names("cuflash.torch.apply_rotary")
def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *positional: NoReturn,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    **unknown: NoReturn,
) -> torch.Tensor:
    """Rotary position embedding: rotate queries or keys by their positions.

    Differentiable any number of times in `x`, `cos` and `sin`, in reverse and
    forward mode and by torch.func.

    Parameters
    ----------
    x : Tensor, (batch, seqlen, heads, head_dim)
        On a CUDA device or the CPU. **3-D is (seqlen, heads, head_dim), 2-D
        is (seqlen, head_dim)**.
    cos, sin : Tensor, (num_positions, rotary_dim / 2)
        float32 (float64 for float64 `x`), or the dtype of `x`.
    positions : Tensor, (batch, seqlen) or broadcastable, optional
        Of any integer dtype: each token's row of `cos` and `sin`. 0, 1, 2,
        ... along seqlen by default. A position outside the tables raises on
        the CPU, if torch computes at once; elsewhere the rotated columns of
        such a token are NaN.
    interleaved, inverse : bool, optional
        As for `cuflash.apply_rotary`.

    Returns
    -------
    Tensor, like `x`

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.apply_rotary`.

    See Also
    --------
    cuflash.apply_rotary : the same for CuPy and NumPy arrays, with equations.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> x = torch.randn(2, 16, 4, 8)
    >>> angles = torch.outer(torch.arange(16), 100.0 ** -torch.arange(4))
    >>> cuflash.torch.apply_rotary(x, angles.cos(), angles.sin()).shape
    torch.Size([2, 16, 4, 8])
    """
    if unknown or positional:
        foreign_names.refuse("cuflash.torch.apply_rotary", unknown, positional)
    given = {"x": x, "cos": cos, "sin": sin}
    if positions is not None:
        given["positions"] = positions
    if torch.compiler.is_compiling():
        _check_compiled(x, cos, sin)
    else:
        check_tensors(given)
        signature = checked_shapes(
            validate.apply_rotary, given,
            "interleaved", interleaved, "inverse", inverse,
        )  # fmt: skip
        if positions is not None and signature and _is_read(positions):
            on_host = {"positions": to_numpy(positions.cpu())}
            validate.positions(Call(signature, {}, None, on_host))
    return _rotated(x, cos, sin, positions, interleaved, inverse)


def _check_compiled(x: Any, cos: Any, sin: Any) -> None:
    """What torch would not notice: it broadcasts, and slices past the end."""
    if cos.shape != sin.shape or cos.ndim != 2:
        raise ShapeError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}, "
            "expected (num_positions, rotary_dim / 2) of both"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(
            f"cos has {cos.shape[1]} columns, expected at most half of x's "
            f"head_dim {x.shape[-1]}"
        )


def _is_read(positions: torch.Tensor) -> bool:
    """Whether the host checks the values of positions."""
    if type(positions) not in PLAIN or (
        torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    ):
        return False
    if request.backend_of(positions) is None:
        return positions.is_cpu
    return reads_values()


def _rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> torch.Tensor:
    with_grad = torch.is_grad_enabled()
    backend = None
    if not (with_grad and (cos.requires_grad or sin.requires_grad)):
        others = () if positions is None else (positions,)
        backend = kernel_backend(x, cos, sin, *others)
    if backend is None:
        rows = _table_rows(x, cos, sin, positions)
        rotated = rotated_columns(x, *rows, interleaved, inverse)
        return torch.cat((rotated, x[..., rotated.shape[-1] :]), -1)
    run = rotary_kernel.apply_rotary
    if with_grad and x.requires_grad:
        run = _Rotated.apply
    return run(backend, x, cos, sin, positions, interleaved, inverse, False)


class _Rotated(torch.autograd.Function):
    """A rotation by the kernel, whose gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        _backend, _x, cos, sin, positions, interleaved, inverse, _ = given
        ctx.save_for_backward(cos, sin, positions)
        ctx.undo = interleaved, not inverse
        return rotary_kernel.apply_rotary(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (dout,), (cos, sin, positions) = gradients, ctx.saved_tensors
        dx = _rotated(dout, cos, sin, positions, *ctx.undo)
        return (None, dx, *[None] * 6)


def _table_rows(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of each token, which broadcast to `x`'s pairs.

    NaN for a position outside the tables.
    """
    if positions is None:
        seqlen = x.shape[1] if x.ndim == 4 else x.shape[0]
        if not torch.jit.is_tracing() and seqlen > cos.shape[0]:
            raise ShapeError(
                f"cos has {cos.shape[0]} rows, expected at least {seqlen}, "
                "x's seqlen: without positions, tokens are at 0, 1, 2, ..."
            )
        rows = (cos[:seqlen], sin[:seqlen])
    else:
        at = positions.long()  # torch takes uint8 for a mask
        inside = ((0 <= at) & (at < cos.shape[0]))[..., None]
        at = torch.where(inside[..., 0], at, 0)
        rows = tuple(
            torch.where(inside, table[at], torch.nan) for table in (cos, sin)
        )
    return rows if x.ndim == 2 else tuple(row[..., None, :] for row in rows)


def rotated_columns(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    inverse: bool,
) -> torch.Tensor:
    """The first columns of `x`, rotated by torch's operations.

    Each pair (a, b) becomes (a cos - b sin, a sin + b cos), in float32
    (float64 for float64 `x`), rounded once.

    Parameters
    ----------
    x : Tensor, (..., head_dim)
    cos, sin : Tensor, (..., pairs)
        Of each row of `x`, or broadcastable.
    interleaved, inverse : bool
    """
    pairs = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turned = x[..., : 2 * pairs].to(wide)
    shape, axis = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    a, b = turned.unflatten(-1, shape).unbind(axis)
    cos, sin = cos.to(wide), sin.to(wide)
    if inverse:
        sin = -sin
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), axis)
    return rotated.flatten(-2).to(x.dtype)
