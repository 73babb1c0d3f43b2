"""Between which numbers the reals of a graph are, whatever a call holds.

From these follows where a derivative needs no test: a factor that is finite
may multiply a 0, and a divisor far from 0 has an inverse. Incoming scores are
taken to be below a 16th of the largest number: of rows with others, no result
is finite. Of arrays of reals and of numbers nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuflash.expressions import nodes, ranges
from cuflash.expressions.nodes import Node


class Bounds(NamedTuple):
    """The smallest and largest value, infinite if it may be; never a NaN."""

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


# None: nothing is known.
_Known = Bounds | None

# Kernels compute reals in one of them.
_MOST = tuple(float(np.finfo(x).max) for x in (np.float32, np.float64))
# By how much of itself an approximate value may be off.
_ERROR = 2.0**-18
# Divisors have an inverse by rcp.approx from the first on, to the second.
_SMALL, _LARGE = 2.0**-100, 2.0**100


def is_finite(node: Node, of_zero: bool = False) -> bool:
    """Whether a node is neither infinite nor NaN; of_zero: of a score of 0."""
    each = _each(node, of_zero)
    return all(x is not None and x.is_finite for x in each)


def is_far_from_zero(node: Node) -> bool:
    """Whether a node, which may be infinite, has a finite inverse."""
    return all(
        x is not None and (x.low >= _SMALL or x.high <= -_SMALL)
        for x in _each(node)
    )


def is_moderate(node: Node) -> bool:
    """Whether both a node and its inverse are far from 0 and infinity."""
    return is_far_from_zero(node) and all(
        x is not None and max(-x.low, x.high) <= _LARGE for x in _each(node)
    )


def _each(node: Node, of_zero: bool = False) -> list[_Known]:
    """The bounds in each real type."""
    if node.kind != "real":
        low, high = ranges.range_of(node)
        return [Bounds(max(low, -(2.0**63)), min(high, 2.0**63))]
    return [_of_real(node, most, of_zero) for most in _MOST]


# What is known, by type and score: graphs share nodes, and slopes ask about
# each. Emptied where it grows large.
_KNOWN: dict[tuple[float, bool], dict[Node, _Known]] = {}
_MOST_KNOWN = 65536


def _of_real(root: Node, most: float, of_zero: bool) -> _Known:
    known = _KNOWN.setdefault((most, of_zero), {})
    if len(known) > _MOST_KNOWN:
        known = _KNOWN[most, of_zero] = {}
    known[nodes.SCORE] = (
        _both(0.0) if of_zero else Bounds(-most / 16, most / 16)
    )
    if root in known:
        return known[root]
    for node in nodes.in_order([root], known):
        if node.kind != "real":
            (known[node],) = _each(node)
            continue
        with np.errstate(all="ignore"):
            known[node] = _rounded(_of(node, known), most)
    return known[root]


def _of(node: Node, known: dict[Node, _Known]) -> _Known:
    if node.is_constant:
        return None if math.isnan(node.value) else _both(node.value)
    if node.op == "tanh":  # whatever its argument but NaN
        return Bounds(-1.0, 1.0) if known[node.args[0]] else None
    args = [known[x] for x in node.args if x.kind != "bool"]
    bounds = [x for x in args if x is not None]
    rule = _RULES.get(node.op)
    if rule is None or len(bounds) < len(args):
        return None
    if node.op == "multiply" and node.args[0] is node.args[1]:
        return _square(bounds[0])
    return rule(*bounds)


def _rounded(bounds: _Known, most: float) -> _Known:
    """Moved by the errors of what computes it; beyond `most`, infinite."""
    if bounds is None:
        return None
    low, high = bounds
    low, high = low - abs(low) * _ERROR, high + abs(high) * _ERROR
    return Bounds(
        low if low >= -most else -math.inf, high if high <= most else math.inf
    )


def _both(value: float) -> Bounds:
    return Bounds(value, value)


# ---- Operations, None where the result may be NaN ----


def _add(a: Bounds, b: Bounds) -> _Known:
    low, high = a.low + b.low, a.high + b.high
    mixed = (a.low == -math.inf and b.high == math.inf) or (
        a.high == math.inf and b.low == -math.inf
    )
    return None if mixed else Bounds(low, high)


def _negative(a: Bounds) -> Bounds:
    return Bounds(-a.high, -a.low)


def _corners(
    function: Callable[[float, float], float], a: Bounds, b: Bounds
) -> Bounds:
    ends = [function(x, y) for x in a for y in b]
    return Bounds(min(ends), max(ends))


def _times(x: float, y: float) -> float:
    return 0.0 if 0 in (x, y) else x * y


def _multiply(a: Bounds, b: Bounds) -> _Known:
    for x, y in ((a, b), (b, a)):
        if x.holds_zero and not y.is_finite:
            return None
    return _corners(_times, a, b)


def _square(a: Bounds) -> Bounds:
    ends = a.low * a.low, a.high * a.high
    return Bounds(0.0 if a.holds_zero else min(ends), max(ends))


def _product_if(a: Bounds, b: Bounds) -> _Known:
    if b.holds_zero and not a.is_finite:
        return None
    return _corners(_times, a, b)


def _divide(a: Bounds, b: Bounds) -> _Known:
    if b.holds_zero or not (a.is_finite or b.is_finite):
        return None
    return _corners(lambda x, y: float(np.divide(x, y)), a, b)


def _absolute(a: Bounds) -> Bounds:
    return Bounds(max(a.low, -a.high, 0.0), max(-a.low, a.high))


def _exponential(base: float) -> Callable[[Bounds], Bounds]:
    return lambda a: Bounds(*(float(np.power(base, x)) for x in a))


def _sqrt(a: Bounds) -> _Known:
    return None if a.low < 0 else Bounds(*map(math.sqrt, a))


def _wave(a: Bounds) -> _Known:
    return Bounds(-1.0, 1.0) if a.is_finite else None


_RULES: dict[str, Callable[..., _Known]] = {
    "to_real": lambda a: a,
    "add": _add,
    "subtract": lambda a, b: _add(a, _negative(b)),
    "multiply": _multiply,
    "product_if": _product_if,
    "divide": _divide,
    "negative": _negative,
    "absolute": _absolute,
    "sign": lambda a: Bounds(-1.0, 1.0),
    "minimum": lambda a, b: Bounds(*map(min, a, b)),
    "maximum": lambda a, b: Bounds(*map(max, a, b)),
    "where": lambda a, b: Bounds(min(a.low, b.low), max(a.high, b.high)),
    "exp": _exponential(math.e),
    "exp2": _exponential(2.0),
    "sqrt": _sqrt,
    "sin": _wave,
    "cos": _wave,
    "erf": lambda a: Bounds(-1.0, 1.0),
    "erfc": lambda a: Bounds(0.0, 2.0),
    "arctan": lambda a: Bounds(-1.6, 1.6),
}
