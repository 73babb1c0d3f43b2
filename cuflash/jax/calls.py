"""The calls that primitives make: what they take and return, by name.

A primitive's operands have names; everything else of a call is its `Asked`:
hashable, so equal calls are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from cuflash.errors import DTypeError
from cuflash.plans import plan
from cuflash.request import checks, mod_tangents, traced
from cuflash.request.options import MOVED
from cuflash.request.problem import Call
from cuflash.request.readout import READOUT_GRADIENTS
from cuflash.request.validate import attention as validate
from cuflash.request.validate import derivatives as validate_derivatives
from cuflash.request.validate import kvcache as validate_kvcache
from cuflash.request.validate import readouts as validate_readouts
from cuflash.request.validate.derivatives import COTANGENTS, TANGENTS
from cuflash.request.vmap import Names

from .abstract import Abstract

Asked: TypeAlias = tuple[tuple[str, Any], ...]  # (argument, value)

_FORWARD_ONLY = {"block_q", "block_k", "num_splits"}
_BACKWARD_ONLY = {"deterministic"}


def asked_of(
    arguments: Mapping[str, Any], numbers: Mapping[str, Any]
) -> Asked:
    """What differs from its default: arguments of all calls, and options."""
    checks.flag("deterministic", arguments.get("deterministic", False))
    given = (
        (name, value)
        for name, value in arguments.items()
        if value is not None and value is not False
    )
    # In one order: equal calls are compiled once.
    return (*given, *sorted(numbers.items()))


class Traced(NamedTuple):
    """A call of traced arrays.

    Attributes
    ----------
    validate : callable
        Checks its arguments.
    arguments : dict
        Those that are not arrays.
    inputs : tuple of str
        The names of the primitive's operands, in order.
    returned : tuple of str
        The names of the call's results, in order.
    results : tuple of str
        Those that the primitive returns, in order.
    unread : tuple of str
        Operands that the call does not take.
    updated : tuple of str
        Operands that the call writes to, the last of the results.
    """

    validate: Callable[..., Call]
    arguments: dict[str, Any]
    inputs: Names
    returned: Names
    results: Names
    unread: Names = ()
    updated: Names = ()

    def named(self, operands: Collection[Any]) -> dict[str, Any]:
        """The arrays that the call takes, by name."""
        given = dict(zip(self.inputs, operands, strict=True))
        return {x: y for x, y in given.items() if x not in self.unread}

    def check(self, arrays: Mapping[str, Abstract]) -> Call:
        """Check it when it is traced; an array's seed may be any number.

        Also what a runner would check: errors of a callback come inside one
        of JAX's.
        """
        arguments, given = self.arguments, dict(arrays)
        if "seed" in given:
            _check_seed(given.pop("seed"))
            arguments = {**arguments, "seed": 0}
        call = self.validate(**given, **arguments)
        plan.check(call.problem)
        return call


def forward(names: Names, asked: Asked, return_lse: Any) -> Traced:
    """`cuflash.forward` of arrays with these names."""
    return_lse = checks.flag("return_lse", return_lse)
    given = _without(asked, _BACKWARD_ONLY)
    results = ("out", "lse")[: 1 + return_lse]
    return Traced(
        validate.forward, given | {"return_lse": return_lse}, names,
        results, results,
    )  # fmt: skip


def backward(names: Names, asked: Asked, wrt: Names, has_dlse: bool) -> Traced:
    """`cuflash.backward` for the gradients of the arrays `wrt`."""
    given = _without(asked, _FORWARD_ONLY)
    given |= {f"return_d{name}": True for name in _moving_options(wrt)}
    read = [x for x in names if x in wrt and traced.is_named(x)]
    if read:
        given |= [mod_tangents.gradients_of(read)]
    returned = ("q", "k", "v", *_moving_options(wrt), *read)
    return Traced(
        validate.backward,
        given,
        _gradient_inputs(names, has_dlse),
        tuple(f"d{name}" for name in returned),
        tuple(f"d{name}" for name in wrt),
    )


def tangent(
    names: Names, wrt: Names, asked: Asked, return_lse: bool, several: bool
) -> Traced:
    """`cuflash.jvp`; `wrt` are the arrays that move."""
    given = _without(asked, _FORWARD_ONLY | _BACKWARD_ONLY)
    results = ("out_dot", "lse_dot")[: 1 + return_lse]
    return Traced(
        validate_derivatives.jvp,
        given | {"return_lse": return_lse},
        (*_named(wrt, TANGENTS, "mod_dots"), *names, "out", "lse"),
        (*("out", "lse")[: 1 + return_lse], *results),
        results,
        unread=("out", "lse"),
    )


def second_gradients(
    names: Names, asked: Asked, moved: Names, wrt: Names, has_dlse: bool
) -> Traced:
    """`cuflash.double_backward` for the gradients of the arrays `wrt`.

    `moved` are the arrays that have cotangents.
    """
    given = _without(asked, _FORWARD_ONLY)
    given |= {f"return_d2{name}": True for name in _moving_options(wrt)}
    if has_dlse:
        given["return_ddlse"] = True
    read = [x for x in names if x in wrt and traced.is_named(x)]
    if read:
        given |= [mod_tangents.gradients_of(read, "return_d2mod")]
    options = (f"d2{name}" for name in (*_moving_options(wrt), *read))
    ddlse = ("ddlse",) * has_dlse
    return Traced(
        validate_derivatives.double_backward,
        given,
        (
            *_named(moved, COTANGENTS, "ddmods"),
            *_gradient_inputs(names, has_dlse),
        ),
        ("d2q", "d2k", "d2v", "ddout", *options, *ddlse),
        (*(f"d2{name}" for name in wrt), "ddout", *ddlse),
    )


def readout(direction: str, names: Names, asked: Asked) -> Traced:
    """`weights`, `weight_sums`, `entropy`, or the gradients of one."""
    given = dict(asked)
    results: Names = ("result",)
    if direction in READOUT_GRADIENTS:
        results = ("dq", "dk", "dlse")
        if given.get("return_drow_weights"):
            results = (*results, "drow_weights")
        read = mod_tangents.with_gradients(given)
        results = *results, *(f"d{x}" for x in read)
    check = validate_readouts.by_name(direction)
    return Traced(check, given, names, results, results)


def forward_kvcache(*, head_dim_v: Any = None, **given: Any) -> Call:
    """Check a call; values are the keys' first columns without v_cache."""
    call = validate_kvcache.with_values(given, head_dim_v)
    return validate_kvcache.forward_kvcache(**call)


def kvcache(names: Names, asked: Asked, return_lse: Any) -> Traced:
    """`cuflash.forward_kvcache`; caches that get new tokens are results."""
    return_lse = checks.flag("return_lse", return_lse)
    returned = ("out", "lse")[: 1 + return_lse]
    updated: Names = ()
    if "k_new" in names:
        updated = tuple(x for x in validate_kvcache.CACHES if x in names)
    return Traced(
        forward_kvcache,
        dict(asked) | {"return_lse": return_lse},
        names,
        returned,
        (*returned, *updated),
        updated=updated,
    )


def _named(wrt: Names, names: Mapping[str, str], argument: str) -> Names:
    """The operands that are tangents of the arrays `wrt`."""
    none = dict.fromkeys(wrt)
    return tuple(mod_tangents.tangents_named(none, names, argument))


def _without(asked: Asked, names: Collection[str]) -> dict[str, Any]:
    return {name: x for name, x in asked if name not in names}


def _gradient_inputs(names: Names, has_dlse: bool) -> Names:
    """The operands of a gradients call; `names` are those of attention."""
    return ("dout", "dlse")[: 1 + has_dlse] + (*names, "out", "lse")


def _moving_options(wrt: Names) -> Names:
    """Those among the arrays `wrt`, in the order of results."""
    return tuple(x for x in MOVED[3:] if x in wrt)


def _check_seed(seed: Abstract) -> None:
    if seed.shape or seed.dtype.kind not in "ui":
        raise DTypeError(
            f"seed has dtype {seed.dtype} and shape {seed.shape}, expected "
            "an int or an array of integers of shape () (of a key: "
            "jax.random.bits(key))"
        )
