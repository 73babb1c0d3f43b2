"""Automatic differentiation of calls on real tensors."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch.autograd import forward_ad

from .batched_grad import is_batched
from .derivatives import Static, gradients_of
from .request import Request

# By one name each, because every backward pass calls them.
_with_grad = torch.is_grad_enabled
_is_transformed = torch._C._are_functorch_transforms_active


class Attention(torch.autograd.Function):
    """out, and lse if wanted, of a request; max_score if it says so."""

    # Function.apply first unwraps what transforms of torch.func leave, which
    # go by `transforms`; its base does the rest in half of the time.
    apply = vars(torch._C._FunctionBase)["apply"]

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        return_lse: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *differentiable: torch.Tensor | None,
    ) -> Any:
        out, lse, *more = request.forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, out, lse, *request.tensors.values())
        ctx.set_materialize_grads(False)
        ctx.request, ctx.names = request, tuple(request.tensors)
        request.tensors = {}  # saved above, where hooks can move them
        if more:
            ctx.mark_non_differentiable(*more)
            return (out, lse, *more) if return_lse else (out, *more)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None, _: Any = None) -> Any:
        if dout is dlse is None:  # second gradients go by way of q, k and v
            return (None,) * len(ctx.needs_input_grad)
        # The gradients have derivatives, or are mapped.
        if (
            _with_grad()
            or forward_ad._current_level >= 0
            or _is_transformed()
            or (dout is not None and is_batched(dout))
            or (dlse is not None and is_batched(dlse))
        ):
            return None, None, *_differentiable(ctx, dout, dlse)
        q, k, v, out, lse, *others = ctx.saved_tensors
        tensors = dict(zip(ctx.names, others, strict=True))
        return None, None, *ctx.request.backward(
            tensors, _wanted(ctx), dout, dlse, q, k, v, out, lse,
        )  # fmt: skip


def _wanted(ctx: Any) -> tuple[str, ...]:
    """The options and arrays whose gradients are needed."""
    needs = ctx.needs_input_grad[5:]
    return tuple(compress(ctx.request.moved, needs)) if any(needs) else ()


def _differentiable(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """The gradients of q, k, v and `Request.moved`."""
    request, saved = ctx.request, ctx.saved_tensors
    if request.by_heads:
        request = request.by_tokens()
        saved = *map(_exchanged, saved[:4]), *saved[4:]
        dout = _exchanged(dout)
    static = Static(request, ctx.names, _wanted(ctx))
    found = gradients_of(static, dout, dlse, saved)
    named = dict(zip(ctx.names, found[5:], strict=True))
    of_qkv = found[:3]
    if ctx.request.by_heads:
        of_qkv = map(_exchanged, of_qkv)
    return *of_qkv, *map(named.get, request.moved)


def _exchanged(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.transpose(1, 2)
