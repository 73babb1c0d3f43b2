"""How the primitives' derivatives follow from each other.

    attention  - tangent ->  tangent    - transposed ->  gradients
    tangent    - of x    ->  second_tangent  - transposed ->  second_gradients
    gradients  - tangent ->  gradients_tangent - transposed -> second_gradients

All further ones, and the value of second_tangent (forward mode over forward
mode), are those of `by_xla`.

With f = <dout, out> + <dlse, lse>, gradients are those of f, and their tangent
is the Hessian of f times x', and the gradients of dout' and dlse'. A Hessian
is symmetric: so second_gradients, by `double_backward`, is both its value and
its transpose. out and lse are passed so that nobody computes them again; what
depends on x by way of them is counted with x, and their tangents are dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, mlir

from cuflash.errors import UnsupportedError
from cuflash.request.options import MOVED
from cuflash.request.traced import is_named
from cuflash.request.vmap import Names

from . import by_xla, functions
from .calls import Asked
from .primitives import (
    attention_p,
    gradients_p,
    gradients_tangent_p,
    second_gradients_p,
    second_tangent_p,
    tangent_p,
)


def _moved(names: Names, tangents: Sequence[Any]) -> dict[str, Any]:
    """The tangents of a call's arrays that are not 0, by name."""
    moved = {
        name: tangent
        for name, tangent in zip(names, tangents, strict=True)
        if type(tangent) is not ad.Zero
    }
    for name in moved:
        if name not in MOVED and not is_named(name):
            raise UnsupportedError(
                f"{name} is differentiated, expected one of "
                f"{', '.join(MOVED)}: cuflash has no gradient of "
                f"{name} (pass jax.lax.stop_gradient({name}))"
            )
    return moved


def _moved_inputs(
    names: Names, tangents: Sequence[Any], asked: Asked
) -> dict[str, Any]:
    """`_moved` of a call's inputs, without arrays that no score reads."""
    scored = functions.scored(names, dict(asked))
    return {
        x: y
        for x, y in _moved(names, tangents).items()
        if not is_named(x) or x in scored
    }


def _sum(parts: Sequence[Sequence[Any]], like: Sequence[Any]) -> list[Any]:
    """The sums of several lists of tangents; 0 of none."""
    if not parts:
        return [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in like]
    return [functools.reduce(ad.add_tangents, x) for x in zip(*parts)]  # noqa: B905


# ---- First derivatives ----


def _attention_jvp(
    operands: Sequence[Any],
    tangents: Sequence[Any],
    *,
    names: Names,
    asked: Asked,
    return_lse: bool,
) -> tuple[list[Any], list[Any]]:
    moved = _moved_inputs(names, tangents, asked)
    results = attention_p.bind(
        *operands, names=names, asked=asked, return_lse=True
    )
    if not moved:
        results = results[: 1 + return_lse]
        return results, _sum([], results)
    moving = tangent_p.bind(
        *moved.values(), *operands, *results, names=names, wrt=tuple(moved),
        asked=asked, return_lse=return_lse, several=False,
    )  # fmt: skip
    return results[: 1 + return_lse], moving


def _tangent_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    names: Names,
    wrt: Names,
    asked: Asked,
    return_lse: bool,
    several: bool,
) -> list[Any]:
    fixed = operands[len(wrt) :]

    def gradients(*cotangents: Any) -> list[Any]:
        return gradients_p.bind(
            *cotangents, *fixed, names=names, wrt=wrt, asked=asked,
            has_dlse=len(cotangents) == 2,
        )  # fmt: skip

    found = _each(gradients, several)(*_there(cotangents))
    return _of_undefined(found, operands, len(wrt))


def _there(cotangents: Sequence[Any]) -> list[Any]:
    """dout, and dlse unless it is 0."""
    dout, *dlse = cotangents
    dlse = [x for x in dlse if type(x) is not ad.Zero]
    return [ad.instantiate_zeros(dout), *dlse]


def _each(call: Callable[..., list[Any]], several: bool) -> Any:
    return jax.vmap(call) if several else call


def _of_undefined(
    found: Sequence[Any], operands: Sequence[Any], num_linear: int
) -> list[Any]:
    """Cotangents of operands, the first of which a primitive is linear in."""
    linear = [
        x if ad.is_undefined_primal(operand) else None
        for x, operand in zip(found, operands[:num_linear], strict=True)
    ]
    return [*linear, *[None] * (len(operands) - num_linear)]


# ---- Second derivatives ----


def _tangent_jvp(
    operands: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Names,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    n = len(wrt)
    first, fixed = operands[:n], operands[n:]
    results = tangent_p.bind(*operands, wrt=wrt, **params)
    parts = []
    linear = _moved(wrt, tangents[:n])
    if linear:
        own = tuple(linear)
        parts.append(
            tangent_p.bind(*linear.values(), *fixed, wrt=own, **params)
        )
    moved = _moved_inputs(params["names"], tangents[n:-2], params["asked"])
    if moved:
        parts.append(
            second_tangent_p.bind(
                *moved.values(), *first, *fixed, wrt=tuple(moved), moved=wrt,
                **params,
            )
        )  # fmt: skip
    return results, _sum(parts, results)


def _second_tangent_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    names: Names,
    wrt: Names,
    moved: Names,
    asked: Asked,
    return_lse: bool,
    several: bool,
) -> list[Any]:
    n = len(wrt)
    first, fixed = operands[n : n + len(moved)], operands[n + len(moved) :]
    cotangents = _there(cotangents)

    def gradients(cotangents: Any, first: Any) -> list[Any]:
        return second_gradients_p.bind(
            *first, *cotangents, *fixed, names=names, asked=asked,
            moved=moved, wrt=wrt, has_dlse=len(cotangents) == 2,
        )[:n]  # fmt: skip

    found = _each(gradients, several)(cotangents, first)
    if several:
        found = [x.sum(axis=0) for x in found]
    return _of_undefined(found, operands, n)


def _gradients_jvp(
    operands: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    results = gradients_p.bind(*operands, **params)
    n = 1 + params["has_dlse"]
    moved = dict(zip(("out", "lse"), tangents[:n], strict=False))
    moved = {x: y for x, y in moved.items() if type(y) is not ad.Zero}
    moved |= _moved_inputs(params["names"], tangents[n:-2], params["asked"])
    parts = []
    if moved:
        parts.append(
            gradients_tangent_p.bind(
                *moved.values(), *operands, moved=tuple(moved), **params
            )
        )
    return results, _sum(parts, results)


def _gradients_tangent_value(
    *operands: Any,
    names: Names,
    asked: Asked,
    moved: Names,
    wrt: Names,
    has_dlse: bool,
) -> list[Any]:
    """The value of gradients_tangent, by kernels."""
    n, own = len(moved), 1 + has_dlse
    given = dict(zip(moved, operands, strict=False))
    fixed = operands[n + own :]
    parts = []
    arrays = {x: y for x, y in given.items() if x not in ("out", "lse")}
    if arrays:
        found = second_gradients_p.bind(
            *arrays.values(), *operands[n:], names=names, asked=asked,
            moved=tuple(arrays), wrt=wrt, has_dlse=has_dlse,
        )  # fmt: skip
        parts.append(found[: len(wrt)])
    if len(arrays) < n:
        dout = given.get("out")
        if dout is None:
            dout = jax.numpy.zeros_like(operands[n])
        dlse = [given["lse"]] if "lse" in given else []
        parts.append(
            gradients_p.bind(
                dout, *dlse, *fixed, names=names, asked=asked, wrt=wrt,
                has_dlse=bool(dlse),
            )
        )  # fmt: skip
    return [functools.reduce(jax.numpy.add, x) for x in zip(*parts)]  # noqa: B905


def _gradients_tangent_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    names: Names,
    asked: Asked,
    moved: Names,
    wrt: Names,
    has_dlse: bool,
) -> list[Any]:
    given = _moved(wrt, cotangents)
    arrays = tuple(x for x in moved if x not in ("out", "lse"))
    found = second_gradients_p.bind(
        *given.values(), *operands[len(moved) :], names=names, asked=asked,
        moved=tuple(given), wrt=arrays, has_dlse=has_dlse,
    )  # fmt: skip
    named = dict(zip((*arrays, "out", "lse"), found, strict=False))
    return _of_undefined([named[x] for x in moved], operands, len(moved))


# ---- Further derivatives, by XLA ----


def _jvp_by_xla(
    primitive: Any, value: Callable[..., list[Any]], num_linear: Any
) -> Any:
    """The rule of a primitive that is linear in its first operands.

    Only its tangents in the others are XLA's.
    """

    def rule(
        operands: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[Any], list[Any]]:
        n = num_linear(**params)
        results = primitive.bind(*operands, **params)
        parts = []
        if any(type(x) is not ad.Zero for x in tangents[:n]):
            linear = map(ad.instantiate_zeros, tangents[:n])
            parts.append(primitive.bind(*linear, *operands[n:], **params))
        at = {
            i: x
            for i, x in enumerate(tangents)
            if i >= n and type(x) is not ad.Zero
        }
        if at:
            parts.append(_along(value, operands, at, params))
        return results, _sum(parts, results)

    return rule


def _along(
    value: Callable[..., list[Any]],
    operands: Sequence[Any],
    tangents: dict[int, Any],
    params: dict[str, Any],
) -> list[Any]:
    """The tangent of a function where some operands move, by their index."""

    def function(*moving: Any) -> list[Any]:
        given = [*operands]
        for i, x in zip(tangents, moving, strict=True):
            given[i] = x
        return value(*given, **params)

    point = tuple(operands[i] for i in tangents)
    found: list[Any] = jax.jvp(function, point, tuple(tangents.values()))[1]
    return found


ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_jvps[gradients_p] = _gradients_jvp
ad.primitive_jvps[second_tangent_p] = _jvp_by_xla(
    second_tangent_p, by_xla.second_tangent, lambda wrt, **_: len(wrt)
)
ad.primitive_jvps[gradients_tangent_p] = _jvp_by_xla(
    gradients_tangent_p,
    by_xla.gradients_tangent,
    lambda moved, **_: len(moved),
)
ad.primitive_jvps[second_gradients_p] = _jvp_by_xla(
    second_gradients_p, by_xla.second_gradients, lambda moved, **_: len(moved)
)
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[second_tangent_p] = _second_tangent_transpose
ad.primitive_transposes[gradients_tangent_p] = _gradients_tangent_transpose
mlir.register_lowering(
    second_tangent_p,
    mlir.lower_fun(by_xla.second_tangent, multiple_results=True),
)
mlir.register_lowering(
    gradients_tangent_p,
    mlir.lower_fun(_gradients_tangent_value, multiple_results=True),
)
