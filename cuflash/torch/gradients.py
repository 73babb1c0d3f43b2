"""Automatic differentiation of calls on real tensors."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import UnsupportedError

from .request import Request

NO_SECOND_DERIVATIVES = (
    "second derivatives of cuflash.torch.attention are not supported: call "
    "backward() or torch.autograd.grad() without create_graph, or use "
    "torch.nn.functional.scaled_dot_product_attention"
)


class Attention(torch.autograd.Function):
    """out, and lse if wanted, of a request."""

    # Function.apply first unwraps what transforms of torch.func leave, which
    # `is_traced` has refused; its base does the rest in half of the time.
    apply = vars(torch._C._FunctionBase)["apply"]

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        return_lse: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> Any:
        out, lse = request.forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, out, lse, *request.tensors.values())
        ctx.set_materialize_grads(False)
        ctx.request, ctx.names = request, tuple(request.tensors)
        request.tensors = {}  # saved above, where hooks can move them
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        q, k, v, out, lse, *others = ctx.saved_tensors
        tensors = dict(zip(ctx.names, others, strict=True))
        *_, with_dbias, with_dsink = ctx.needs_input_grad
        arguments = (
            ctx.request, tensors, with_dbias, with_dsink,
            dout, dlse, q, k, v, out, lse,
        )  # fmt: skip
        if torch.is_grad_enabled():  # by create_graph=True
            return None, None, *Once.apply(*arguments)
        return None, None, *of_inputs(*arguments)


class Once(torch.autograd.Function):
    """The gradients, which have none themselves."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return of_inputs(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(NO_SECOND_DERIVATIVES)


def of_inputs(
    request: Request,
    tensors: dict[str, torch.Tensor],
    with_dbias: bool,
    with_dsink: bool,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[Any, ...]:
    """The gradients of q, k, v, bias and sink; None for those not wanted."""
    if dout is None:
        dout = torch.zeros_like(out)
    if dout.is_neg():
        dout = dout.resolve_neg()
    if dlse is not None and dlse.is_neg():
        dlse = dlse.resolve_neg()
    dq, dk, dv, *others = request.backward(
        dout, dlse, q, k, v, out, lse, tensors, with_dbias, with_dsink
    )
    dbias = others.pop(0) if with_dbias else None
    dsink = others.pop(0) if with_dsink else None
    return dq, dk, dv, dbias, dsink
