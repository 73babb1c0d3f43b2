"""The gradients of `weights`, `weight_sums` and `entropy`, by autograd.

The operators' own, in eager mode and in compiled code; inside transforms of
torch.func those of autograd Functions, which tell how vmap runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cuflash.errors import UnsupportedError
from cuflash.request.readout import READOUTS

from . import batched_grad, readout_vmap
from .batched_grad import is_batched
from .derivatives import plain
from .ops import LIBRARY, OPERATORS
from .readout_function_ops import Program, call, parted, places_of
from .readout_ops import POSITIONAL, no_second, raise_no_second

_is_transformed = torch._C._are_functorch_transforms_active

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
        found = _by_place(ctx, needs, cotangent, _Gradients.apply)
        return None, None, None, *map(found.get, range(len(needs)))

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
        return _gradients(name, numbers, program, *map(plain, tensors))

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


def _gradients(
    name: str, numbers: dict[str, Any], program: Program | None, *tensors: Any
) -> tuple[Any, ...]:
    """dq, dk, dlse; if wanted drow_weights, those of what is read."""
    found = call(f"{name}_backward", tensors, numbers, program)
    if numbers["return_drow_weights"]:
        return found
    return *found[:3], *found[4:]


def _by_place(
    ctx: Any, needs: Sequence[bool], cotangent: Any, run: Callable[..., Any]
) -> dict[int, Any]:
    """Gradients by the places of saved tensors, of which some need them.

    `run` takes what `_gradients` does.
    """
    numbers = {**ctx.numbers, "return_drow_weights": needs[3]}
    wanted = [0, 1, 2, *([3] if needs[3] else [])]
    if ctx.program is not None:
        first, others, read = parted(ctx.name, ctx.saved_tensors)
        before = len(first) + len(others)
        places = places_of(ctx.program, read)
        numbers["of_read"] = [x for x in places if needs[before + x]]
        wanted += [before + x for x in numbers["of_read"]]
    own = functools.partial(run, ctx.name, numbers, ctx.program)
    found = batched_grad.call(own, cotangent, *ctx.saved_tensors)
    return dict(zip(wanted, found, strict=True))


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


def _setup_functions(
    name: str, ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any
) -> None:
    q, k, lse, read, values, graphs, *others = inputs
    others += [None] * (len(POSITIONAL) - len(others))
    ctx.save_for_backward(q, k, lse, *others, *read)
    ctx.name, ctx.program = name, (values, graphs)
    ctx.numbers = {
        x: y for x, y in keyword_only_inputs.items() if x != "dtype"
    }


def _backward_functions(ctx: Any, cotangent: Any) -> Any:
    needs = ctx.needs_input_grad  # trailing arguments may be left out
    of_others = (*needs[6:], *(False,) * len(POSITIONAL))[: len(POSITIONAL)]
    of_each = *needs[:3], *of_others, *needs[3]
    is_mapped = is_batched(cotangent) or _is_transformed()
    run = _Gradients.apply if is_mapped else _gradients
    by_place = _by_place(ctx, of_each, cotangent, run)
    found = [by_place.get(x) for x in range(len(of_each))]
    count = 3 + len(POSITIONAL)
    of_values: Any = (
        None if ctx.program[0] else []
    )  # torch takes [] for tensors
    gradients = *found[:3], found[count:], of_values, None, *found[3:count]
    return gradients[: len(needs)]


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
    torch.library.register_autograd(
        f"cuflash::function_{_name}",
        _backward_functions,
        setup_context=functools.partial(_setup_functions, _name),
        lib=LIBRARY,
    )
    torch.library.register_autograd(
        f"cuflash::function_{_name}_backward",
        functools.partial(raise_no_second, _name),
        lib=LIBRARY,
    )
