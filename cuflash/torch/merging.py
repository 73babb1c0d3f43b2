"""`merge_states` on torch tensors, differentiable.

On a CUDA device by the kernel of `cuflash.merge_states`. On the CPU, compiled
and under transforms by torch's own operations, which compilers fuse.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from cuflash.api import foreign_names
from cuflash.backends.base import Backend
from cuflash.errors import DTypeError, ShapeError
from cuflash.launch import rows
from cuflash.request.problem import MOST_STATES, Call, strip, strip_lse
from cuflash.request.validate import merging as validate

from .checks import check_tensors
from .request import kernel_backend
from .signature import checked, checked_shapes, describe

Merged = tuple[torch.Tensor, torch.Tensor]


@foreign_names.our_names("cuflash.torch.merge_states")
def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    *more: torch.Tensor,
    **unknown: NoReturn,
) -> Merged:
    """Merge the results of attention over disjoint sets of keys.

    Differentiable any number of times in all tensors, in reverse and forward
    mode and by torch.func.

    Parameters
    ----------
    out_a : Tensor, (batch, seqlen_q, num_heads_q, head_dim_v)
        The result of `attention` over one set of keys, on a CUDA device or
        the CPU. **3-D is (seqlen_q, num_heads_q, head_dim_v), 2-D is
        (seqlen_q, head_dim_v)**.
    lse_a : Tensor, (batch, num_heads_q, seqlen_q)
        Its lse, float32 (float64 for float64 `out_a`).
    *more : Tensor
        ``out_b, lse_b, out_c, lse_c, ...``: for the same queries, the
        results over other sets of keys, any number of pairs.

    Returns
    -------
    out, lse : Tensor
        As `attention` returns them over all the keys.

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.merge_states`.

    See Also
    --------
    cuflash.merge_states : the same for CuPy and NumPy arrays, with equations.

    Notes
    -----
    With w_i = exp(lse_i - lse), the gradients of a pair are w_i dout and
    w_i (dout . (out_i - out) + dlse). A row with lse -inf has none.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
    >>> a, b = (
    ...     cuflash.torch.attention(q, k[:, i], v[:, i], return_lse=True)
    ...     for i in (slice(0, 10), slice(10, None))
    ... )
    >>> out, lse = cuflash.torch.merge_states(*a, *b)
    >>> torch.allclose(out, cuflash.torch.attention(q, k, v), atol=1e-6)
    True
    """
    if unknown:
        raise foreign_names.unexpected("cuflash.torch.merge_states", unknown)
    given = (out_a, lse_a, *more)
    if torch.compiler.is_compiling():
        _check_compiled(given)
    else:
        states = validate.states_of(given)
        check_tensors(states)
        backend = kernel_backend(*given)
        if backend is not None and len(given) <= 2 * MOST_STATES:
            if torch.is_grad_enabled() and any(x.requires_grad for x in given):
                return _Merged.apply(backend, *given)
            return _by_kernel(backend, *given)
        checked_shapes(validate.merge_states, states)
    return _by_torch(*given)


def _check_compiled(given: tuple[torch.Tensor, ...]) -> None:
    """What torch would not notice: it broadcasts."""
    if len(given) % 2:
        raise DTypeError(
            f"merge_states got {len(given)} arrays, expected out_a, lse_a, "
            "out_b, lse_b, ...: each out is followed by its lse"
        )
    out = given[0].shape
    heads_first = (*out[:-3], *out[-2:-4:-1])
    for index, x in enumerate(given):
        expected = tuple(heads_first if index % 2 else out)
        if tuple(x.shape) != expected:
            raise ShapeError(
                f"argument {index} of merge_states has shape "
                f"{tuple(x.shape)}, expected {expected} as out_a has "
                f"{tuple(out)}"
            )


def _by_kernel(backend: Backend, *given: torch.Tensor) -> Merged:
    states = validate.states_of(given)
    described = tuple(describe(name, x) for name, x in states.items())
    signature = checked(validate.merge_states, described)
    out, lse = rows.merge_states(Call(signature, states), backend)
    return strip(out, signature.rank), strip_lse(lse, signature.rank)


class _Merged(torch.autograd.Function):
    """A merge by the kernel; its gradients by torch's operations."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, *given: torch.Tensor) -> Merged:
        merged = _by_kernel(backend, *given)
        ctx.save_for_backward(*given, *merged)
        ctx.set_materialize_grads(False)
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        dout, dlse = gradients
        *given, out, lse = ctx.saved_tensors
        found: list[Any] = [None]
        for out_i, lse_i in zip(given[::2], given[1::2], strict=True):
            found += _gradients(dout, dlse, out_i, lse_i, out, lse)
        return tuple(found)


def _gradients(
    dout: Any, dlse: Any, out_i: Any, lse_i: Any, out: Any, lse: Any
) -> tuple[Any, Any]:
    """The gradients of one pair, differentiable (reference/tile_state.py)."""
    seen = lse_i != -torch.inf
    exponent = torch.where(seen, lse_i - lse, 0)
    weight = torch.where(seen, exponent.exp(), 0)
    dout_i, of_lse = None, 0 if dlse is None else dlse
    if dout is not None:
        wide = dout.to(weight.dtype)
        difference = out_i.to(weight.dtype) - out
        difference = torch.where(_of_rows(seen), difference, 0)
        of_lse = of_lse + _heads_first((wide * difference).sum(-1))
        dout_i = (_of_rows(weight) * wide).to(dout.dtype)
    return dout_i, weight * of_lse


def _by_torch(*given: torch.Tensor) -> Merged:
    """A merge by torch's operations, in the dtype of lse."""
    outs, lses = given[::2], given[1::2]
    # Nothing depends on the maximum, which shifts exponents only.
    m = functools.reduce(torch.fmax, lses).detach()
    shift = torch.where(m == -torch.inf, 0, m)
    total, summed = 0, 0
    for out, lse in zip(outs, lses, strict=True):
        weight = (lse - shift).exp()
        seen = _of_rows(lse != -torch.inf)
        row = torch.where(seen, out.to(weight.dtype), 0)
        total, summed = total + weight, summed + _of_rows(weight) * row
    divisor = torch.where(total == 0, 1, total)
    merged = (summed / _of_rows(divisor)).to(outs[0].dtype)
    # A row that sees no key, or one with lse inf, whose weights are NaN.
    ends = (total == 0) | (m == torch.inf)
    return merged, torch.where(ends, m, shift + divisor.log())


def _of_rows(x: torch.Tensor) -> torch.Tensor:
    """Numbers of rows, laid out as lse, that broadcast to out."""
    return _heads_first(x)[..., None]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """From lse's order of axes to that of out's rows, or back."""
    return x if x.ndim < 2 else x.transpose(-1, -2)
