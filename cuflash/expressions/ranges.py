"""What values the ints of a graph may have, whatever a call's lengths.

From these the text takes 32 bits where they do, and leaves out the test of an
index that cannot be negative.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from cuflash.expressions import nodes
from cuflash.expressions.nodes import Node

Range = tuple[float, float]
_T = TypeVar("_T")

# Sequences of calls with options have fewer tokens, arrays' axes fewer
# elements, than 2^30 and 2^31 (request/validate).
_TOKENS = (0, 2**30 - 1)
_INT32 = (-(2**31), 2**31 - 1)
_ALL = (-math.inf, math.inf)
_INDICES: dict[str, Range] = {
    "b": (0, _INT32[1]),
    "h": (0, _INT32[1]),
    "q_idx": _TOKENS,
    "kv_idx": _TOKENS,
    "seqlen_q": (0, 2**30),
    "seqlen_k": (0, 2**30),
}


def _corners(function: Callable[[float, float], float]) -> Callable:
    def of(a: Range, b: Range) -> Range:
        values = [function(x, y) for x in a for y in b]
        if any(math.isnan(x) for x in values):
            return _ALL
        return min(values), max(values)

    return of


def _multiply(x: float, y: float) -> float:
    return 0 if 0 in (x, y) else x * y


def _floor_divide(a: Range, b: Range) -> Range:
    if b[0] > 0:
        return _corners(lambda x, y: x if math.isinf(x) else x // y)(a, b)
    most = max(abs(x) for x in a)
    return -most, most


def _remainder(a: Range, b: Range) -> Range:
    if b[0] > 0:
        return 0, b[1] - 1
    return min(b[0], 0), max(b[1], 0)


def _shift(a: Range, b: Range, left: bool) -> Range:
    if b[0] != b[1] or not 0 <= b[0] <= 62:
        return _ALL if left else (min(a[0], 0), max(a[1], 0))
    power = 2.0 ** b[0]
    if left:
        return a[0] * power, a[1] * power
    low, high = (x if math.isinf(x) else x // power for x in a)
    return low, high


def _bits(a: Range, b: Range) -> Range:
    """Of | and ^ : as many bits as the larger operand."""
    low, high = min(a[0], b[0], 0), max(a[1], b[1], 0)
    if math.isinf(low) or math.isinf(high):
        return _ALL
    power = 1 << int(max(high, -low - 1)).bit_length()
    return (-power if low < 0 else 0), power - 1


def _and(a: Range, b: Range) -> Range:
    """Not above an operand that is not negative."""
    highs = [high for low, high in (a, b) if low >= 0]
    return (0, min(highs)) if highs else _bits(a, b)


_OPERATIONS: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "subtract": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "multiply": _corners(_multiply),
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "negative": lambda a: (-a[1], -a[0]),
    "absolute": lambda a: (
        max(a[0], -a[1], 0), max(abs(a[0]), abs(a[1]))
    ),
    "sign": lambda a: (-1, 1),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "bitwise_and": _and,
    "bitwise_or": _bits,
    "bitwise_xor": _bits,
    "invert": lambda a: (-a[1] - 1, -a[0] - 1),
    "left_shift": lambda a, b: _shift(a, b, left=True),
    "right_shift": lambda a, b: _shift(a, b, left=False),
    "to_int": lambda a: a,
}  # fmt: skip


_KNOWN: weakref.WeakKeyDictionary[Node, Range] = weakref.WeakKeyDictionary()


def _of(node: Node, args: list[Range]) -> Range:
    if node.kind == "bool":
        return 0, 1
    if node.kind == "real":
        return _ALL
    if node.is_constant:
        return node.value, node.value
    if node.op == "index":
        return _INDICES[node.value]
    if node.op == "size":
        return 0, _INT32[1]
    if node.op == "gather":
        limits = np.iinfo(np.dtype(node.value[1]))
        return min(int(limits.min), 0), int(limits.max)
    if node.op == "number":
        return _ALL
    low, high = _OPERATIONS[node.op](*args)
    fits = -(2**63) <= low <= high < 2**63  # what does not may be anything
    return (low, high) if fits else _ALL


def _remembered(
    node: Node,
    known: weakref.WeakKeyDictionary[Node, _T],
    of: Callable[[Node, list[_T]], _T],
) -> _T:
    """What follows from operands, kept in `known` for all that node needs."""
    if node not in known:
        for x in nodes.in_order([node], known):
            known[x] = of(x, [known[y] for y in x.args])
    return known[node]


def range_of(node: Node) -> Range:
    """The smallest and the largest value that an int may have."""
    return _remembered(node, _KNOWN, _of)


def fits_int32(node: Node) -> bool:
    low, high = range_of(node)
    return _INT32[0] <= low and high <= _INT32[1]


_WIDE: weakref.WeakKeyDictionary[Node, bool] = weakref.WeakKeyDictionary()


def is_wide(node: Node) -> bool:
    """Whether an int is computed in 64 bits."""
    return _remembered(node, _WIDE, _is_wide)


def _is_wide(node: Node, args: list[bool]) -> bool:
    if node.kind != "int" or node.op in ("index", "size"):
        return False
    if node.op in ("to_int", "left_shift", "right_shift", "number"):
        return True
    narrow = fits_int32(node)
    if node.op == "gather" or node.is_constant:
        return not narrow
    return not narrow or any(args)
