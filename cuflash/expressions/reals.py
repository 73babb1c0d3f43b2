"""Arithmetic of small ints in reals, where a score needs reals anyway.

``to_real(q_idx - kv_idx)`` converts once a pair, at a quarter of the rate of
additions; ``to_real(q_idx) - to_real(kv_idx)`` once a row and once a column,
and is the same number while all ints in it are below 2^24. Only an int's 0 has
no sign: where a division or a power could tell, nothing is moved.
"""

from __future__ import annotations

import functools

from cuflash.expressions import nodes
from cuflash.expressions.functions import apply, converted
from cuflash.expressions.nodes import Node

# Tokens of a sequence whose indices, and sums of a few, float32 holds exactly.
SHORT = 2**22
_EXACT = 2**24

_SUMS = ("add", "subtract")
_CHOICES = ("minimum", "maximum")
# What tells -0.0 from 0.0, if it is not the first of two operands.
_TELL_SIGNS = ("divide", "floor_divide", "remainder", "power")


@functools.lru_cache(maxsize=4096)
def in_reals(root: Node) -> Node:
    """The graph with conversions moved to its indices."""
    found: dict[Node, Node] = {}
    order = nodes.in_order([root])
    signed = any(
        x.op in _TELL_SIGNS and not x.args[1].is_constant for x in order
    )
    for node in order:
        real = None
        if node.op == "to_real":
            real = _real_of(node.args[0], signed)
        if real is None:
            args = tuple(found[x] for x in node.args)
            real = nodes.with_args(node, args)
        found[node] = real
    return found[root]


def _real_of(root: Node, signed: bool) -> Node | None:
    """A real node of the same value, None if one might be rounded.

    signed : whether -0.0 is another value than 0.0.
    """
    known: dict[Node, tuple[Node, int]] = {}
    for node in nodes.in_order([root]):
        if any(x not in known for x in node.args):
            return None
        if signed and node.op in ("negative", "multiply"):
            return None
        args = [known[x] for x in node.args]
        sizes = [size for _, size in args]
        if node.is_constant and node.kind == "int":
            size = abs(node.value)
        elif node.op == "index" and node.value in ("q_idx", "kv_idx"):
            size = SHORT
        elif node.op in _SUMS:
            size = sum(sizes)
        elif node.op in _CHOICES:
            size = max(sizes)
        elif node.op in ("negative", "absolute"):
            size = sizes[0]
        elif node.op == "multiply":
            size = sizes[0] * sizes[1]
        else:
            return None
        if size > _EXACT:
            return None
        reals = [x for x, _ in args]
        real = apply(node.op, *reals) if reals else converted(node, "real")
        known[node] = real, size
    return known[root][0]
