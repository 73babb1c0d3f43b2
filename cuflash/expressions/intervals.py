"""What values a graph has over whole tiles: intervals, on NumPy arrays.

An interval is a pair of arrays, its ends, with one element a tile; that of a
bool is whether it is true of all pairs, and of any. Every value of every pair
lies within, so that a mask whose interval is false hides the tile. The ends of
ints are float64, as long as it holds them exactly. Those of reals have the
dtype in which values are computed: rounding is monotone, so ends that are
rounded like values bound them. An end that is not known is infinite. A NaN may
hide behind it, so no operation makes a finite end of an infinite one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.expressions import nodes
from cuflash.expressions.nodes import Node

Interval = tuple[Any, Any]

LARGEST_INT = 2.0**53  # float64 holds all ints up to it
# Longer slices are not looked at, nor are those of larger arrays.
LONGEST_SLICE, LARGEST_ARRAY = 4096, 2**24
NONE, PARTLY, ALL = 0, 1, 2  # as the kernels' Visibility


class Intervals:
    """The intervals of nodes, each computed once.

    Parameters
    ----------
    leaves : mapping of Node to Interval
        Of indices and lengths: the first and the last of each tile.
    numbers : sequence
        Of `mod_arrays`, by slot.
    real : dtype
        That in which reals are computed.
    extremes : Extremes
        Of the arrays.
    """

    def __init__(
        self,
        leaves: Mapping[Node, Interval],
        numbers: Sequence[Any],
        real: Any,
        extremes: Extremes,
    ) -> None:
        self._known: dict[Node, Interval] = {
            x: (np.asarray(low, np.float64), np.asarray(high, np.float64))
            for x, (low, high) in leaves.items()
        }
        self._numbers, self._real = numbers, np.dtype(real)
        self._extremes = extremes

    @np.errstate(all="ignore")
    def visibility(self, mask: Node) -> np.ndarray:
        """`NONE`, `PARTLY`, which means unknown, or `ALL` of each tile."""
        every, some = self.of(mask)
        return np.add(every, some, dtype=np.int8)

    def of(self, root: Node) -> Interval:
        """The interval of a root."""
        known = self._known
        for node in nodes.in_order([root]):
            if node not in known:
                known[node] = self._computed(node)
        return known[root]

    def _computed(self, node: Node) -> Interval:
        if node.is_constant:
            return self._exact(node, node.value)
        if node.op == "number":
            return self._exact(node, self._numbers[node.value])
        if node.op == "size":
            slot, axis = node.value
            return self._exact(node, self._extremes.shape(slot)[axis])
        args = [self._known[x] for x in node.args]
        if node.op == "gather":
            ends = self._extremes.of(node.value[0], args)
        elif node.op == "to_real":
            low, high = map(np.asarray, args[0])
            ends = low.astype(self._real), high.astype(self._real)
        else:
            rules = _BY_KIND[node.args[-1].kind]
            rule = _where if node.op == "where" else rules.get(node.op)
            ends = rule(*args) if rule else (-np.inf, np.inf)
        return self._bounded(node, *ends)

    def _exact(self, node: Node, value: Any) -> Interval:
        if node.kind == "real":
            value = self._real.type(value)
        elif node.kind == "int":
            value = np.float64(value)
        return self._bounded(node, value, value)

    def _bounded(self, node: Node, low: Any, high: Any) -> Interval:
        """Ends that hold, infinite where they do not; a bool may be either."""
        if node.kind == "bool":
            if np.asarray(low).dtype != bool:
                return np.False_, np.True_
            return low, high
        dtype = self._real if node.kind == "real" else np.dtype(np.float64)
        low, high = np.asarray(low, dtype), np.asarray(high, dtype)
        if node.kind == "int":
            lost = ~(np.maximum(-low, high) <= LARGEST_INT)
        else:
            lost = np.isnan(low) | np.isnan(high)
        if not lost.any():
            return low, high
        return np.where(lost, -np.inf, low), np.where(lost, np.inf, high)


# Operations -----------------------------------------------------------------


def _corners(function: Callable[..., Any]) -> Callable[..., Interval]:
    """Of a function that is monotone in each operand; NaN is unknown."""

    def rule(a: Interval, b: Interval) -> Interval:
        ends = [function(x, y) for x in a for y in b]
        low = functools.reduce(np.minimum, ends)
        return low, functools.reduce(np.maximum, ends)

    return rule


def _monotone(function: Callable[..., Any]) -> Callable[..., Interval]:
    return lambda *args: (
        function(*(x for x, _ in args)), function(*(x for _, x in args)),
    )  # fmt: skip


def _if(known: Any, interval: Interval) -> Interval:
    """An interval where something holds, else nothing is known."""
    low, high = interval
    return np.where(known, low, -np.inf), np.where(known, high, np.inf)


def _finite(*intervals: Interval) -> Any:
    return functools.reduce(
        np.logical_and, (np.isfinite(x) for pair in intervals for x in pair)
    )


def _where_finite(rule: Callable[..., Interval]) -> Callable[..., Interval]:
    return lambda *args: _if(_finite(*args), rule(*args))


def _absolute(a: Interval) -> Interval:
    low, high = a
    most = np.maximum(np.abs(low), np.abs(high))
    return np.maximum(np.maximum(low, -high), 0), most


def _divide(a: Interval, b: Interval) -> Interval:
    signed = (b[0] > 0) | (b[1] < 0)
    return _if(_finite(a, b) & signed, _corners(np.divide)(a, b))


def _floor_divide(a: Interval, b: Interval) -> Interval:
    """By a positive divisor."""
    known = _finite(a, b) & (b[0] > 0)
    return _if(known, _corners(np.floor_divide)(a, b))


def _remainder(a: Interval, b: Interval) -> Interval:
    """Between those of the ends if one divisor has one quotient."""
    known = _finite(a, b) & (b[0] > 0)
    one = (b[0] == b[1]) & (a[0] // b[0] == a[1] // b[0])
    low = np.where(one, np.remainder(a[0], b[0]), 0)
    high = np.where(one, np.remainder(a[1], b[0]), b[1] - 1)
    return _if(known, (low, high))


def _left_shift(a: Interval, b: Interval) -> Interval:
    power = np.exp2(np.clip(b[0], 0, 62))
    return _if(b[0] == b[1], (a[0] * power, a[1] * power))


def _right_shift(a: Interval, b: Interval) -> Interval:
    power = np.exp2(np.clip(b[0], 0, 62))
    ends = np.floor(a[0] / power), np.floor(a[1] / power)
    return _if(b[0] == b[1], ends)


def _and(a: Interval, b: Interval) -> Interval:
    """At most the smaller, if neither is below 0."""
    high = np.minimum(a[1], b[1])
    return _if((a[0] >= 0) & (b[0] >= 0), (0 * high, high))


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    every, some = condition
    low, high = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])
    low = np.where(every, a[0], np.where(some, low, b[0]))
    return low, np.where(every, a[1], np.where(some, high, b[1]))


def _at_most(high: Any, low: Any) -> Any:
    """Whether a high end is at most a low one, and no NaN hides behind it."""
    return (high <= low) & (high < np.inf) & (low > -np.inf)


def _equal(a: Interval, b: Interval) -> Interval:
    one = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return one & _finite(a, b), (a[0] <= b[1]) & (b[0] <= a[1])


def _not(a: Interval) -> Interval:
    return ~np.asarray(a[1]), ~np.asarray(a[0])


_RULES: dict[str, Callable[..., Interval]] = {
    "add": _monotone(np.add),
    "subtract": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "multiply": _corners(np.multiply),
    "divide": _divide,
    "negative": lambda a: (-a[1], -a[0]),
    "absolute": _where_finite(_absolute),
    "sign": _where_finite(_monotone(np.sign)),
    "minimum": _where_finite(_monotone(np.minimum)),
    "maximum": _where_finite(_monotone(np.maximum)),
    "floor": _monotone(np.floor),
    "ceil": _monotone(np.ceil),
    "trunc": _monotone(np.trunc),
    "rint": _monotone(np.rint),
    "to_int": _where_finite(_monotone(np.trunc)),
    # Whether it is true of all pairs, and of any.
    "less": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "less_equal": lambda a, b: (_at_most(a[1], b[0]), a[0] <= b[1]),
    "greater": lambda a, b: (a[0] > b[1], a[1] > b[0]),
    "greater_equal": lambda a, b: (_at_most(b[1], a[0]), a[1] >= b[0]),
    "equal": _equal,
    "not_equal": lambda a, b: _not(_equal(a, b)),
}
_OF_INTS = _RULES | {
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "left_shift": _left_shift,
    "right_shift": _right_shift,
    "bitwise_and": _and,
}
_OF_BOOLS: dict[str, Callable[..., Interval]] = {
    "to_int": lambda a: (np.float64(a[0]), np.float64(a[1])),
    "bitwise_and": _monotone(np.logical_and),
    "bitwise_or": _monotone(np.logical_or),
    "bitwise_xor": lambda a, b: _not(_equal(a, b)),
    "invert": _not,
    "equal": _equal,
    "not_equal": lambda a, b: _not(_equal(a, b)),
}
_BY_KIND = {"bool": _OF_BOOLS, "int": _OF_INTS, "real": _RULES}


# Arrays ---------------------------------------------------------------------


class Extremes:
    """The smallest and largest elements of slices of arrays.

    Of each axis along which slices are taken it keeps those of all runs of
    2^n elements, from which two make any run.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays
        self._runs: dict[tuple[int, int], list[Interval]] = {}

    def shape(self, slot: int) -> tuple[int, ...]:
        return tuple(self._arrays[slot].shape)

    def of(self, slot: int, indices: Sequence[Interval]) -> Interval:
        """What a gather reads, with the intervals of its indices."""
        array = self._arrays[slot]
        wide = [
            axis
            for axis, (low, high) in enumerate(indices)
            if not np.array_equal(low, high)
        ]
        if array.size == 0:
            return self._outside(array)
        if len(wide) > 1:
            return self._unknown(array)
        places, outside = [], np.False_
        for size, interval in zip(array.shape, indices, strict=True):
            low, high, leaves = _within(interval, size)
            places.append((low, high))
            outside = outside | leaves
        if wide:
            first, last = places[wide[0]]
            longest = (last - first).max(initial=0) + 1
            if longest > LONGEST_SLICE or array.size > LARGEST_ARRAY:
                return self._unknown(array)
        axis = wide[0] if wide else array.ndim - 1
        low, high = self._slice(slot, axis, places) if places else (
            array[()], array[()]
        )  # fmt: skip
        nothing = np.zeros((), array.dtype)
        low = np.where(outside, np.minimum(low, nothing), low)
        return low, np.where(outside, np.maximum(high, nothing), high)

    def _outside(self, array: np.ndarray) -> Interval:
        nothing = np.zeros((), array.dtype)
        return nothing, nothing

    def _unknown(self, array: np.ndarray) -> Interval:
        if array.dtype == bool:
            return np.False_, np.True_
        return -np.inf, np.inf

    def _slice(self, slot: int, axis: int, places: list[Interval]) -> Interval:
        """The ends of each tile's slice along an axis.

        Two runs of 2^n elements cover it: its first and its last.
        """
        low, high = places[axis]
        level = np.frexp(high - low + 1)[1] - 1
        levels = self._levels(slot, axis, int(level.max(initial=0)))
        shapes = [np.shape(x) for x, _ in places]
        shape = np.broadcast_shapes(*shapes, np.shape(high))
        least = np.empty(shape, self._arrays[slot].dtype)
        most = np.empty_like(least)
        at = np.broadcast_to(level, shape)
        ends = [np.broadcast_to(x, shape) for x, _ in places]
        last = np.broadcast_to(high, shape)
        for n in np.unique(at):
            chosen = at == n
            first = tuple(x[chosen] for x in ends)
            other = list(first)
            other[axis] = last[chosen] - (1 << int(n)) + 1
            smallest, largest = levels[n]
            second = tuple(other)
            least[chosen] = np.minimum(smallest[first], smallest[second])
            most[chosen] = np.maximum(largest[first], largest[second])
        return least, most

    def _levels(self, slot: int, axis: int, most: int) -> list[Interval]:
        array = self._arrays[slot]
        levels = self._runs.setdefault((slot, axis), [(array, array)])
        while len(levels) <= most:
            step = 1 << (len(levels) - 1)
            low, high = levels[-1]
            count = low.shape[axis] - step
            near = _along(axis, slice(0, count))
            far = _along(axis, slice(step, None))
            levels.append((
                np.minimum(low[near], low[far]),
                np.maximum(high[near], high[far]),
            ))  # fmt: skip
        return levels


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, part)


def _within(interval: Interval, size: int) -> tuple[Any, Any, Any]:
    """First and last place along an axis, and whether some lie outside.

    An interval with indices on both sides of 0 may read the whole axis.
    """
    low, high = interval
    outside = (low < -size) | (high >= size)
    negative = high < 0
    low = np.where(negative, low + size, low)
    high = np.where(negative, high + size, high)
    both = (low < 0) & ~negative
    low, high = np.where(both, 0, low), np.where(both, size - 1, high)
    low = np.clip(low, 0, size - 1).astype(np.int64)
    return low, np.clip(high, low, size - 1).astype(np.int64), outside
