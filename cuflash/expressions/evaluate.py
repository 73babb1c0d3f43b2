"""Evaluates graphs on NumPy arrays: of a tile's pairs, or of whole ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.expressions import nodes
from cuflash.expressions.functions import FUNCTIONS
from cuflash.expressions.nodes import Node


class Values:
    """The values of nodes, each computed once.

    Parameters
    ----------
    leaves : mapping of Node to object
        Values of the leaves: of `nodes.SCORE` and of indices and lengths.
        Arrays broadcast: a row of queries is (q, 1), one of keys (1, k).
    arrays, numbers : sequence
        Of `mod_arrays`, by slot.
    real : dtype
        That in which reals are computed.
    check : bool
        Whether an index outside an array raises an IndexError.
    """

    def __init__(
        self,
        leaves: Mapping[Node, Any],
        arrays: Sequence[Any],
        numbers: Sequence[Any],
        real: Any,
        check: bool = False,
    ) -> None:
        self._known = dict(leaves)
        self._arrays, self._numbers = arrays, numbers
        self._real, self._check = np.dtype(real), check

    def of(self, root: Node) -> Any:
        """A root's value: an array, or a number if it is all pairs'."""
        known = self._known
        if root not in known:
            for node in nodes.in_order([root]):
                if node not in known:
                    known[node] = self._computed(node)
        return known[root]

    def kept(self, roots: Iterable[Node]) -> dict[Node, Any]:
        """The values of roots, for the leaves of other values."""
        return {x: self.of(x) for x in roots}

    def place(self, gather: Node) -> tuple[tuple[Any, ...], Any]:
        """Where a gather reads: indices, 0 if outside, and where inside."""
        array = self._arrays[gather.value[0]]
        places, inside = [], np.True_
        for node, size in zip(gather.args, array.shape, strict=True):
            index = np.asarray(self.of(node))
            index = np.where(index < 0, index + size, index)
            within = (index >= 0) & (index < size)
            places.append(np.where(within, index, 0))
            inside = inside & within
        return tuple(places), inside

    def _computed(self, node: Node) -> Any:
        if node.is_constant:
            return self._as(node.kind, node.value)
        if node.op == "number":
            return self._as(node.kind, self._numbers[node.value])
        if node.op == "size":
            slot, axis = node.value
            return np.int64(self._arrays[slot].shape[axis])
        if node.op == "gather":
            return self._gathered(node)
        args = [self._known[x] for x in node.args]
        if node.op == "to_real":
            return np.asarray(args[0]).astype(self._real)
        value = FUNCTIONS[node.op].evaluate(*args)
        return value

    def _as(self, kind: str, value: Any) -> Any:
        if kind == "real":
            with np.errstate(over="ignore"):
                return self._real.type(value)
        return np.int64(value) if kind == "int" else np.bool_(value)

    def _gathered(self, node: Node) -> Any:
        array = self._arrays[node.value[0]]
        if array.size == 0:
            places, inside = None, np.False_
        else:
            places, inside = self.place(node)
        if self._check and not np.all(inside):
            raise IndexError(
                f"an index of array {node.value[0]} of mod_arrays is outside"
                f" its shape {array.shape}"
            )
        kind = {"real": self._real, "int": np.int64, "bool": np.bool_}
        dtype = kind[node.kind]
        if places is None:
            return dtype(0) if callable(dtype) else dtype.type(0)
        with np.errstate(over="ignore"):
            value = np.asarray(array[places]).astype(dtype)
        return np.where(inside, value, np.zeros((), dtype))
