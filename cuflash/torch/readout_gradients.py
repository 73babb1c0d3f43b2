"""The gradients of `weights`, `weight_sums` and `entropy`, by autograd.

The operators' own, in eager mode and in compiled code; inside transforms of
torch.func those of autograd Functions, which tell how vmap runs them.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from cuflash.errors import UnsupportedError
from cuflash.request.readout import READOUTS

from . import readout_vmap
from .derivatives import plain
from .ops import LIBRARY, OPERATORS

_FORWARD_MODE = (
    "cuflash.torch.{} has no forward mode, expected reverse mode "
    "(torch.func.vjp, grad or jacrev)"
)


class Readout(torch.autograd.Function):
    """A readout inside transforms."""

    @staticmethod
    def forward(name: str, numbers: dict[str, Any], *tensors: Any) -> Any:
        return getattr(OPERATORS, name)(*map(plain, tensors), **numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, numbers, *tensors = inputs
        ctx.numbers = {x: y for x, y in numbers.items() if x != "dtype"}
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        of_rows = ctx.needs_input_grad[5]
        numbers = {**ctx.numbers, "return_drow_weights": of_rows}
        found = _Gradients.apply(
            ctx.name, numbers, cotangent, *ctx.saved_tensors
        )
        missing = len(ctx.needs_input_grad) - 2 - len(found)
        return None, None, *found, *(None,) * missing

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(_FORWARD_MODE.format(ctx.name))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, name: str, numbers: Any, *tensors: Any
    ) -> Any:
        call = functools.partial(Readout.apply, name, numbers)
        return readout_vmap.mapped(name, call, info, in_dims[2:], tensors)


class _Gradients(torch.autograd.Function):
    """dq, dk, dlse and, if wanted, drow_weights."""

    @staticmethod
    def forward(name: str, numbers: dict[str, Any], *tensors: Any) -> Any:
        operator = getattr(OPERATORS, f"{name}_backward")
        found = operator(*map(plain, tensors), **numbers)
        return found if numbers["return_drow_weights"] else found[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise _no_second(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise _no_second(ctx.name)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, name: str, numbers: Any, *tensors: Any
    ) -> Any:
        call = functools.partial(_Gradients.apply, name, numbers)
        own = f"{name}_backward"
        return readout_vmap.mapped(own, call, info, in_dims[2:], tensors)


def _no_second(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"second derivatives of cuflash.torch.{name} are not supported: call "
        "backward() or torch.autograd.grad() without create_graph"
    )


# Of operators ----------------------------------------------------------------


def _setup(
    ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.numbers = dict(keyword_only_inputs)


def _backward(name: str, ctx: Any, cotangent: Any) -> Any:
    numbers = {x: y for x, y in ctx.numbers.items() if x != "dtype"}
    needs = ctx.needs_input_grad  # trailing arguments may be left out
    of_rows = any(needs[3:4])
    operator = getattr(OPERATORS, f"{name}_backward")
    *found, drow_weights = operator(
        cotangent, *ctx.saved_tensors, **numbers, return_drow_weights=of_rows
    )
    found += [drow_weights if of_rows else None]
    return (*found, *(None,) * len(needs))[: len(needs)]


def _raise(name: str, ctx: Any, *_: Any) -> NoReturn:
    raise _no_second(name)


for _name in READOUTS:
    torch.library.register_autograd(
        f"cuflash::{_name}",
        functools.partial(_backward, _name),
        setup_context=_setup,
        lib=LIBRARY,
    )
    torch.library.register_autograd(
        f"cuflash::{_name}_backward",
        functools.partial(_raise, _name),
        lib=LIBRARY,
    )
