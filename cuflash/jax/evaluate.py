"""The value of a recorded graph on JAX arrays, which JAX differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.scipy import special

from cuflash.expressions import nodes
from cuflash.expressions.nodes import Node


def evaluate(
    root: Node,
    leaves: Mapping[str, Any],
    arrays: Sequence[Any],
    numbers: Sequence[Any],
    wide: Any,
) -> Any:
    """The value of a graph, for all pairs.

    Parameters
    ----------
    root : Node
    leaves : mapping
        The score and the indices by name; they broadcast to the pairs.
    arrays, numbers : sequence
        By slot.
    wide : dtype
        Of reals.
    """
    found: dict[Node, Any] = {}
    for node in nodes.in_order([root]):
        args = [found[x] for x in node.args]
        if node.op == "gather":
            value = _gathered(arrays[node.value[0]], args)
            found[node] = value.astype(wide) if node.kind == "real" else value
        elif node.op in ("score", "index"):
            found[node] = leaves[node.value or "score"]
        elif node.op == "number":
            found[node] = numbers[node.value]
        elif node.op == "size":
            slot, axis = node.value
            found[node] = arrays[slot].shape[axis]
        elif node.is_constant:
            found[node] = node.value
        elif node.op == "to_real":
            found[node] = jnp.asarray(args[0]).astype(wide)
        elif _is_cut(node):
            found[node] = found[node.args[0].args[0]]
        else:
            function = _FUNCTIONS.get(node.op) or getattr(jnp, node.op)
            found[node] = function(*args)
    return found[root]


def _is_cut(node: Node) -> bool:
    """Whether an int is cut to 32 bits, by shifts: here all have 32."""
    several = (node, *node.args[:1])
    names = [x.op for x in several]
    return names == ["right_shift", "left_shift"] and all(
        nodes.same_constant(x.args[1], 32) for x in several
    )


def _gathered(array: Any, indices: Sequence[Any]) -> Any:
    """Elements; 0 outside, where an index below 0 counts from the end."""
    inside: Any = True
    places = []
    for i, size in zip(map(jnp.asarray, indices), array.shape, strict=True):
        at = jnp.where(i < 0, i + size, i)
        inside = inside & (at >= 0) & (at < size)
        places.append(jnp.clip(at, 0, size - 1))
    value = array[tuple(places)]
    kept = jnp.where(inside, value, jnp.zeros((), value.dtype))
    return kept.astype(jnp.int32) if value.dtype.kind in "iu" else kept


def _of_divisor(function: Callable[..., Any]) -> Callable[..., Any]:
    """An int divided by 0 is 0."""

    def divided(a: Any, b: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(a, b), jnp.floating):
            return function(a, b)
        return jnp.where(b == 0, 0, function(a, jnp.where(b == 0, 1, b)))

    return divided


def _shifted(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, jnp.clip(b, 0, 31))


def _to_int(x: Any) -> Any:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32)
    return jnp.where(abs(x) < 2.0**31, x, 0).astype(jnp.int32)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor_divide": _of_divisor(jnp.floor_divide),
    "remainder": _of_divisor(jnp.remainder),
    "left_shift": _shifted(jnp.left_shift),
    "right_shift": _shifted(jnp.right_shift),
    "to_int": _to_int,
    "erf": special.erf,
    "erfc": special.erfc,
    # Of equal operands the first one's branch is taken.
    "minimum": lambda a, b: jnp.where(a <= b, a, b),
    "maximum": lambda a, b: jnp.where(a >= b, a, b),
}
