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
from .readout_function_ops import Program, call, parted, places_of
from .readout_ops import no_second, raise_no_second

_FORWARD_MODE = (
    "cuflash.torch.{} has no forward mode, expected reverse mode "
    "(torch.func.vjp, grad or jacrev)"
)


class Readout(torch.autograd.Function):
    """A readout inside transforms."""

    @staticmethod
    def forward(
        name: str,
        numbers: dict[str, Any],
        program: Program | None,
        *tensors: Any,
    ) -> Any:
        return call(name, [*map(plain, tensors)], numbers, program)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, numbers, ctx.program, *tensors = inputs
        ctx.numbers = {x: y for x, y in numbers.items() if x != "dtype"}
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        needs = ctx.needs_input_grad[3:]
        numbers = {**ctx.numbers, "return_drow_weights": needs[3]}
        wanted = [0, 1, 2, *([3] if needs[3] else [])]
        if ctx.program is not None:
            first, others, read = parted(ctx.name, ctx.saved_tensors)
            before = len(first) + len(others)
            places = places_of(ctx.program, read)
            numbers["of_read"] = [x for x in places if needs[before + x]]
            wanted += [before + x for x in numbers["of_read"]]
        found = _Gradients.apply(
            ctx.name, numbers, ctx.program, cotangent, *ctx.saved_tensors
        )
        by_place = dict(zip(wanted, found, strict=True))
        return None, None, None, *map(by_place.get, range(len(needs)))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(_FORWARD_MODE.format(ctx.name))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        name: str,
        numbers: Any,
        program: Program | None,
        *tensors: Any,
    ) -> Any:
        run = functools.partial(Readout.apply, name, numbers, program)
        return readout_vmap.mapped(
            name, run, info, in_dims[3:], tensors, program
        )


class _Gradients(torch.autograd.Function):
    """dq, dk, dlse; if wanted drow_weights, those of what is read."""

    @staticmethod
    def forward(
        name: str,
        numbers: dict[str, Any],
        program: Program | None,
        *tensors: Any,
    ) -> Any:
        own = f"{name}_backward"
        found = call(own, [*map(plain, tensors)], numbers, program)
        return (
            found
            if numbers["return_drow_weights"]
            else (
                *found[:3],
                *found[4:],
            )
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise no_second(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise no_second(ctx.name)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        name: str,
        numbers: Any,
        program: Program | None,
        *tensors: Any,
    ) -> Any:
        run = functools.partial(_Gradients.apply, name, numbers, program)
        return readout_vmap.mapped(
            f"{name}_backward", run, info, in_dims[3:], tensors, program,
            numbers.get("of_read", ()),
        )  # fmt: skip


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


for _name in READOUTS:
    torch.library.register_autograd(
        f"cuflash::{_name}",
        functools.partial(_backward, _name),
        setup_context=_setup,
        lib=LIBRARY,
    )
    torch.library.register_autograd(
        f"cuflash::{_name}_backward",
        functools.partial(raise_no_second, _name),
        lib=LIBRARY,
    )
