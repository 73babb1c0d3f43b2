"""Derivatives of attention by XLA: the values of primitives without kernels.

Each function takes the operands of the primitive of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from cuflash.request.vmap import Names

from . import blocks
from .calls import Asked


def _attend(
    fixed: dict[str, Any], asked: Asked, return_lse: bool
) -> Callable[[dict[str, Any]], list[Any]]:
    """Attention as a function of some of its arrays."""
    return lambda moving: blocks.attend({**fixed, **moving}, dict(asked))[
        : 1 + return_lse
    ]


def _pushed(
    function: Callable[..., Any], at: dict[str, Any], moved: dict[str, Any]
) -> Any:
    """The tangent of a function, where some of its arrays move."""
    zeros = {x: jax.numpy.zeros_like(at[x]) for x in at if x not in moved}
    return jax.jvp(function, (at,), ({**zeros, **moved},))[1]


def _parted(
    operands: tuple[Any, ...], moved: Names, names: Names, has_dlse: bool
) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """Tangents by name, then dout and dlse, then the call's arrays."""
    n, m = len(moved), len(moved) + 1 + has_dlse
    tangents = dict(zip(moved, operands, strict=False))
    fixed = dict(zip(names, operands[m:-2], strict=True))
    return tangents, [*operands[n:m]], fixed


def second_tangent(
    *operands: Any,
    names: Names,
    wrt: Names,
    moved: Names,
    asked: Asked,
    return_lse: bool,
    several: bool,
) -> list[Any]:
    """The second derivative of attention along two tangents."""
    n, m = len(wrt), len(wrt) + len(moved)
    second = dict(zip(wrt, operands, strict=False))
    fixed = dict(zip(names, operands[m:-2], strict=True))
    point = {x: fixed[x] for x in dict.fromkeys((*wrt, *moved))}
    function = _attend(fixed, asked, return_lse)

    def along(first: list[Any]) -> list[Any]:
        tangents = dict(zip(moved, first, strict=True))
        found: list[Any] = _pushed(
            lambda x: _pushed(function, x, tangents), point, second
        )
        return found

    if several:
        along = jax.vmap(along)
    results: list[Any] = along([*operands[n:m]])
    return results


def second_gradients(
    *operands: Any,
    names: Names,
    asked: Asked,
    moved: Names,
    wrt: Names,
    has_dlse: bool,
) -> list[Any]:
    """The gradients of <dout, out'> + <dlse, lse'>."""
    tangents, given, fixed = _parted(operands, moved, names, has_dlse)
    function = _attend(fixed, asked, has_dlse)
    frozen = {x: fixed[x] for x in moved if x not in wrt}

    def pushed(point: dict[str, Any]) -> Any:
        return _pushed(function, {**frozen, **point}, tangents)

    point = {x: fixed[x] for x in wrt}
    values, pull = jax.vjp(pushed, point)
    (found,) = pull(given)
    return [*(found[x] for x in wrt), *values]


def gradients_tangent(
    *operands: Any,
    names: Names,
    asked: Asked,
    moved: Names,
    wrt: Names,
    has_dlse: bool,
) -> list[Any]:
    """The tangent of the gradients."""
    tangents, given, fixed = _parted(operands, moved, names, has_dlse)
    function = _attend(fixed, asked, has_dlse)
    arrays = dict(zip(("out", "lse"), given, strict=False))
    arrays |= {
        x: fixed[x] for x in dict.fromkeys((*wrt, *moved)) if x in fixed
    }

    def gradients(given: dict[str, Any]) -> list[Any]:
        inner = {x: y for x, y in given.items() if x not in ("out", "lse")}
        cotangents = [given[x] for x in ("out", "lse") if x in given]
        (found,) = jax.vjp(function, inner)[1](cotangents)
        return [found[x] for x in wrt]

    found: list[Any] = _pushed(gradients, arrays, tangents)
    return found
