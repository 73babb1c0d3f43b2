"""The operators' gradients: their kernels under torch's Autograd key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuflash.errors import UnsupportedError
from cuflash.request.options import DIFFERENTIABLE

from .ops import KERNELS, LIBRARY
from .tracing import is_traced, refuse_tangents

NO_SECOND_DERIVATIVES = (
    "second derivatives of cuflash.torch.attention are not supported in "
    "compiled and traced calls: call it in eager mode, on plain tensors"
)


class Traced(torch.autograd.Function):
    """out and lse by an operator, and their gradients by its partner."""

    @staticmethod
    def forward(
        ctx: Any, name: str, numbers: dict[str, Any], *tensors: Any
    ) -> Any:
        out, lse = below(name, tensors, numbers)
        ctx.save_for_backward(*tensors[:3], out, lse, *tensors[3:])
        ctx.set_materialize_grads(False)
        ctx.name, ctx.numbers = name, dict(numbers)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        backward = getattr(torch.ops.cuflash, f"{ctx.name}_backward")
        needs = ctx.needs_input_grad[2:]
        numbers = ctx.numbers
        numbers.pop("num_splits", None)
        # Trailing arguments that are not given are left out.
        named = dict(zip(DIFFERENTIABLE, needs[3:], strict=False))
        if any(named.values()):
            wanted = {f"return_d{x}": y for x, y in named.items()}
            numbers = {**numbers, **wanted}
        gradients = backward(dout, dlse, *ctx.saved_tensors, **numbers)
        others = (
            x if is_wanted else None
            for x, is_wanted in zip(
                gradients[3:], named.values(), strict=False
            )
        )
        found = (*gradients[:3], *others, *(None,) * len(needs))
        return None, None, *found[: len(needs)]


class TracedOnce(torch.autograd.Function):
    """Gradients by an operator, which have none themselves."""

    @staticmethod
    def forward(
        ctx: Any, name: str, numbers: dict[str, Any], *tensors: Any
    ) -> Any:
        return below(name, tensors, numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(NO_SECOND_DERIVATIVES)


def below(name: str, tensors: Any, numbers: dict[str, Any]) -> Any:
    """Call an operator's next kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        operator = getattr(torch.ops.cuflash, name).default
        return operator(*tensors, **numbers)


def _autograd_kernel(name: str, first: int, function: Any) -> Callable:
    """The kernel of an operator whose argument `first` is q."""
    run = KERNELS[name]

    def kernel(*tensors: Any, **numbers: Any) -> Any:
        refuse_tangents(tensors)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return function.apply(name, numbers, *tensors)
        if is_traced(*tensors[first : first + 3]):
            return below(name, tensors, numbers)
        # Same kernel; skips the dispatcher.
        return run(*tensors, **numbers)

    return kernel


for _name in KERNELS:
    _first, _function = (2, TracedOnce) if "_back" in _name else (0, Traced)
    LIBRARY.impl(_name, _autograd_kernel(_name, _first, _function), "Autograd")
