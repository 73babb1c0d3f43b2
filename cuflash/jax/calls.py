"""Checked calls of traced arguments.

A primitive's operands have names; everything else of a call is its `Asked`:
hashable, so equal calls are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from cuflash.errors import DTypeError
from cuflash.plans import plan
from cuflash.request import checks
from cuflash.request.options import MOVED
from cuflash.request.problem import Call
from cuflash.request.validate import attention as validate
from cuflash.request.validate import derivatives as validate_derivatives
from cuflash.request.validate.derivatives import COTANGENTS, TANGENTS
from cuflash.request.vmap import Names

from .abstract import Abstract

Asked: TypeAlias = tuple[tuple[str, Any], ...]  # (argument, value)

_FORWARD_ONLY = ("block_q", "block_k", "num_splits")
_BACKWARD_ONLY = ("deterministic",)


def asked_of(
    arguments: Mapping[str, Any], numbers: Mapping[str, Any]
) -> Asked:
    """What differs from its default: arguments of all calls, and options."""
    checks.flag("deterministic", arguments["deterministic"])
    given = (
        (name, value)
        for name, value in arguments.items()
        if value is not None and value is not False
    )
    # In one order: equal calls are compiled once.
    return (*given, *sorted(numbers.items()))


def forward_call(
    arrays: Mapping[str, Abstract], asked: Asked, return_lse: bool
) -> Call:
    """Check a forward call."""
    given = {**forward_arguments(asked), "return_lse": return_lse}
    return _checked(validate.forward, arrays, given)


def backward_call(
    arrays: Mapping[str, Abstract], asked: Asked, wrt: Names
) -> Call:
    """Check a backward call for the gradients of the arrays `wrt`."""
    given = gradient_arguments(asked, wrt)
    return _checked(validate.backward, arrays, given)


def tangent_call(
    arrays: Mapping[str, Abstract], asked: Asked, return_lse: bool
) -> Call:
    """Check a jvp call."""
    given = {**tangent_arguments(asked), "return_lse": return_lse}
    return _checked(validate_derivatives.jvp, arrays, given)


def second_gradients_call(
    arrays: Mapping[str, Abstract], asked: Asked, wrt: Names, has_dlse: bool
) -> Call:
    """Check a double_backward call for the gradients of the arrays `wrt`."""
    given = second_arguments(asked, wrt, has_dlse)
    return _checked(validate_derivatives.double_backward, arrays, given)


def _checked(
    check: Callable[..., Call],
    arrays: Mapping[str, Abstract],
    given: dict[str, Any],
) -> Call:
    """A call with a plan; for a seed that is an array any number stands."""
    arrays = dict(arrays)
    if "seed" in arrays:
        _check_seed(arrays.pop("seed"))
        given["seed"] = 0
    call = check(**arrays, **given)
    plan.check(call.problem)
    return call


def forward_arguments(asked: Asked) -> dict[str, Any]:
    """The arguments of `cuflash.forward` that are not arrays."""
    return {k: x for k, x in asked if k not in _BACKWARD_ONLY}


def gradient_arguments(asked: Asked, wrt: Names) -> dict[str, Any]:
    """The arguments of `cuflash.backward` that are not arrays."""
    given = {k: x for k, x in asked if k not in _FORWARD_ONLY}
    for name in gradient_names(wrt)[3:]:
        given[f"return_d{name}"] = True
    return given


def tangent_arguments(asked: Asked) -> dict[str, Any]:
    """The arguments of `cuflash.jvp` that are not arrays."""
    other = (*_FORWARD_ONLY, *_BACKWARD_ONLY)
    return {k: x for k, x in asked if k not in other}


def second_arguments(
    asked: Asked, wrt: Names, has_dlse: bool
) -> dict[str, Any]:
    """The arguments of `cuflash.double_backward` that are not arrays."""
    given = {k: x for k, x in asked if k not in _FORWARD_ONLY}
    for name in gradient_names(wrt)[3:]:
        given[f"return_d2{name}"] = True
    if has_dlse:
        given["return_ddlse"] = True
    return given


def gradient_inputs(names: Names, has_dlse: bool) -> Names:
    """The operands of a gradients call; `names` are those of attention."""
    return ("dout", "dlse")[: 1 + has_dlse] + (*names, "out", "lse")


def tangent_inputs(names: Names, wrt: Names) -> Names:
    """The operands of a tangent call; `wrt` are the arrays that move."""
    return (*(TANGENTS[x] for x in wrt), *names, "out", "lse")


def second_inputs(names: Names, moved: Names, has_dlse: bool) -> Names:
    """The operands of a second_gradients call."""
    cotangents = (COTANGENTS[x] for x in moved)
    return (*cotangents, *gradient_inputs(names, has_dlse))


def second_names(wrt: Names, has_dlse: bool) -> Names:
    """What a double_backward call returns gradients of, in its order."""
    more = gradient_names(wrt)[3:]
    return ("q", "k", "v", "out", *more, *("lse",) * has_dlse)


def gradient_names(wrt: Names) -> Names:
    """The arrays whose gradients a backward call returns, in its order."""
    return tuple(x for x in MOVED if x in wrt or x in "qkv")


def _check_seed(seed: Abstract) -> None:
    if seed.shape or seed.dtype.kind not in "ui":
        raise DTypeError(
            f"seed has dtype {seed.dtype} and shape {seed.shape}, expected "
            "an int or an array of integers of shape () (of a key: "
            "jax.random.bits(key))"
        )
