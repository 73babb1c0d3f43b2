"""Evaluates graphs on NumPy arrays: of a tile's pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.expressions import nodes, ranges
from cuflash.expressions.functions import FUNCTIONS
from cuflash.expressions.nodes import Node

_QUERY, _KEY = nodes.index("q_idx"), nodes.index("kv_idx")

# Smaller arrays are not worth a buffer.
LEAST_BUFFER = 4096


class ModArrays:
    """Arrays and numbers that graphs read, by slot.

    Parameters
    ----------
    arrays, numbers : sequence
    """

    def __init__(self, arrays: Sequence[Any], numbers: Sequence[Any]) -> None:
        self.arrays, self.numbers = arrays, numbers
        self._flat: dict[int, np.ndarray] = {}

    def flat(self, slot: int) -> np.ndarray:
        """An array's elements in C order."""
        if slot not in self._flat:
            self._flat[slot] = np.ascontiguousarray(self.arrays[slot]).ravel()
        return self._flat[slot]


class Buffers:
    """Memory for the large values of one tile after the other.

    New memory costs more than what is computed into it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple, list[np.ndarray]] = {}
        self._lent: dict[int, np.ndarray] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array to be overwritten."""
        free = self._free.get((shape, np.dtype(dtype)))
        array = free.pop() if free else np.empty(shape, dtype)
        self._lent[id(array)] = array
        return array

    def has_lent(self, array: Any) -> bool:
        return id(array) in self._lent

    def give_back(self, array: np.ndarray) -> None:
        """Take an array again that was lent, any other not."""
        if self._lent.pop(id(array), None) is not None:
            key = array.shape, array.dtype
            self._free.setdefault(key, []).append(array)

    def recycle(self) -> None:
        """Take all again: what was computed before is no longer needed."""
        for array in [*self._lent.values()]:
            self.give_back(array)


class Place(NamedTuple):
    """Where a gather reads, among an array's elements in C order.

    Attributes
    ----------
    first : int
        What all pairs share of it.
    rest : ndarray of int
        Added to it; 0 outside.
    inside : ndarray of bool
    """

    first: int
    rest: np.ndarray
    inside: np.ndarray


@functools.lru_cache(maxsize=4096)
def _schedule(
    roots: tuple[Node, ...],
) -> tuple[tuple[Node, tuple[Node, ...]], ...]:
    """What roots need in order; with each the operands that it uses last."""
    last: dict[Node, Node] = {}
    order = nodes.in_order(roots)
    for node in order:
        last |= dict.fromkeys(node.args, node)
    dead: dict[Node, list[Node]] = {}
    for node, user in last.items():
        if node not in roots:
            dead.setdefault(user, []).append(node)
    return tuple((x, tuple(dead.get(x, ()))) for x in order)


def _widened(x: Any) -> Any:
    """An int32 as int64; others as they are."""
    x = np.asarray(x)
    return x.astype(np.int64) if x.dtype == np.int32 else x


class Values:
    """The values of nodes, each computed once.

    Ints that 32 bits hold, whatever a call's lengths, have 32 bits.

    Parameters
    ----------
    leaves : mapping of Node to object
        Values of the leaves: of `nodes.SCORE` and of indices and lengths; and
        of any other nodes that are known. Arrays broadcast: a row of queries
        is (q, 1), one of keys (1, k).
    given : ModArrays
    real : dtype
        That in which reals are computed.
    buffers : Buffers, optional
        For large values: those before are overwritten, and so is the score.
        They allow one call of `of`.
    """

    def __init__(
        self,
        leaves: Mapping[Node, Any],
        given: ModArrays,
        real: Any,
        buffers: Buffers | None = None,
    ) -> None:
        self._known = dict(leaves)
        self._given, self._real = given, np.dtype(real)
        self._buffers = buffers
        if buffers is not None:
            buffers.recycle()

    def of(self, *roots: Node) -> list[Any]:
        """The values of roots: arrays, or numbers that all pairs share."""
        known = self._known
        for node, dead in _schedule(roots):
            if node not in known:
                known[node] = self._computed(node, dead)
            for x in dead if self._buffers is not None else ():
                self._end(x, known[node])
        return [known[x] for x in roots]

    def _end(self, node: Node, result: Any) -> None:
        """Forget a value whose memory others may use."""
        value, buffers = self._known[node], self._buffers
        if node is nodes.SCORE:
            del self._known[node]
        elif buffers is not None and buffers.has_lent(value):
            del self._known[node]
            if value is not result:
                buffers.give_back(value)

    def place(self, gather: Node) -> Place:
        """Where a gather reads. Its indices have to be known."""
        shape = self._given.arrays[gather.value[0]].shape
        first, stride = 0, 1
        rest: Any = None
        inside: Any = np.True_
        for node, size in zip(gather.args[::-1], shape[::-1], strict=True):
            index = np.asarray(self._known[node])
            low, high = (index.min(), index.max()) if index.size else (0, 0)
            if low < 0:
                index = np.where(index < 0, index + size, index)
            if low < -size or high >= size:
                within = (index >= 0) & (index < size)
                inside, index = inside & within, np.where(within, index, 0)
            if index.size == 1:
                first += int(index.item()) * stride
            else:
                wide = index.astype(np.int64, copy=False)
                part = wide if stride == 1 else wide * stride
                rest = part if rest is None else rest + part
            stride *= size
        return Place(
            first, np.zeros((), int) if rest is None else rest, inside
        )

    def block(self, gather: Node, array: np.ndarray) -> np.ndarray | None:
        """The block that a gather reads, of an array with its array's shape.

        A view, broadcastable to all pairs; None if it does not read one:
        with an index of the head's, or q_idx or kv_idx once, on each axis.
        """
        index: list[int | slice] = []
        tokens = []
        for node, size in zip(gather.args, array.shape, strict=True):
            value = np.asarray(self._known[node])
            first = int(value.flat[0]) if value.size else size
            if node in (_QUERY, _KEY):
                stop = first + value.size
                if node in tokens or value.size and value.flat[-1] + 1 != stop:
                    return None
                index.append(slice(first, stop))
                tokens.append(node)
            else:
                first += size if first < 0 else 0
                stop = first + value.size
                index.append(first)
                if value.size > 1:
                    return None
            if first < 0 or stop > size:
                return None
        view = array[(*index, ...)]  # never a number
        if tokens == [_KEY, _QUERY]:
            return view.T
        return view[:, None] if tokens == [_QUERY] else view

    def _computed(self, node: Node, dead: tuple[Node, ...]) -> Any:
        if node.is_constant:
            return self._dtype(node).type(node.value)
        if node.op == "number":
            return self._dtype(node).type(self._given.numbers[node.value])
        if node.op == "size":
            slot, axis = node.value
            return np.int32(self._given.arrays[slot].shape[axis])
        if node.op == "gather":
            return self._gathered(node)
        args = [self._known[x] for x in node.args]
        wants = self._dtype(node)
        if wants == np.int64:  # NumPy computes in the operands' dtype
            args = [_widened(x) for x in args]
        shape = np.broadcast_shapes(*map(np.shape, args))
        if self._buffers is None or np.prod(shape) < LEAST_BUFFER:
            value = FUNCTIONS[node.op].evaluate(*args)
            return value if value.dtype == wants else value.astype(wants)
        out = self._buffer(node, wants, shape, args, dead)
        if node.op in _WITH_OUT:
            _WITH_OUT[node.op](*args, out)
        elif node.op in _UFUNCS:
            getattr(np, node.op)(*args, out=out, casting="unsafe")
        else:
            np.copyto(out, FUNCTIONS[node.op].evaluate(*args), "unsafe")
        return out

    def _dtype(self, node: Node) -> np.dtype:
        if node.kind == "real":
            return self._real
        if node.kind == "bool":
            return np.dtype(bool)
        return np.dtype(np.int64 if ranges.is_wide(node) else np.int32)

    def _buffer(
        self,
        node: Node,
        dtype: np.dtype,
        shape: tuple[int, ...],
        args: list[Any],
        dead: tuple[Node, ...],
    ) -> np.ndarray:
        """Memory for a result: an operand's, if that is not needed again."""
        buffers = self._buffers
        assert buffers is not None
        for arg, value in zip(node.args, args, strict=True):
            if arg not in dead or np.shape(value) != shape:
                continue
            owned = buffers.has_lent(value) or arg is nodes.SCORE
            if owned and value.dtype == dtype and node.op in _UFUNCS:
                return value
        return buffers.take(shape, dtype)

    def _gathered(self, node: Node) -> Any:
        slot, dtype = node.value[0], self._dtype(node)
        array = self._given.arrays[slot]
        block = self.block(node, array)
        if block is not None:
            with np.errstate(over="ignore"):
                return block.astype(dtype, copy=False)
        elements = self._given.flat(slot)
        first, place, inside = self.place(node)
        if not elements.size:
            return np.zeros(np.shape(place), dtype)
        value: np.ndarray
        if self._buffers is None or np.size(place) < LEAST_BUFFER:
            value = elements[first:].take(place)
        else:
            value = self._buffers.take(place.shape, elements.dtype)
            elements[first:].take(place, out=value, mode="clip")
        with np.errstate(over="ignore"):
            value = value.astype(dtype, copy=False)
        if np.all(inside):
            return value
        return np.where(inside, value, np.zeros((), dtype))


# With `out`, of operands of one kind; and those that are no ufuncs.
_UFUNCS = {
    *("add", "subtract", "multiply", "divide", "negative", "absolute"),
    *("sign", "minimum", "maximum", "power", "exp", "exp2", "expm1", "log"),
    *("log2", "log10", "log1p", "tanh", "sqrt", "sin", "cos", "floor"),
    *("arctan", "ceil", "trunc", "rint", "less", "less_equal", "greater"),
    *("greater_equal", "equal", "not_equal", "bitwise_and", "bitwise_or"),
    *("bitwise_xor", "invert", "isnan", "isinf"),
}


def _to_real(x: Any, out: np.ndarray) -> None:
    np.copyto(out, x, casting="unsafe")


def _where(condition: Any, a: Any, b: Any, out: np.ndarray) -> None:
    np.copyto(out, b, casting="unsafe")
    np.copyto(out, a, casting="unsafe", where=condition)


def _product_if(a: Any, b: Any, out: np.ndarray) -> None:
    """A product that has a NaN or infinity is looked at again."""
    np.multiply(a, b, out=out)
    if not np.isfinite(out.sum()):
        np.copyto(out, a, where=np.equal(a, 0))


_WITH_OUT: dict[str, Callable[..., None]] = {
    "to_real": _to_real, "where": _where, "product_if": _product_if,
}  # fmt: skip
