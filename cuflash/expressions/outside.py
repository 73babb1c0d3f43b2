"""Which values follow from reads outside arrays (CUFLASH_CHECK).

Such a read gives 0. A pair's result follows from one unless the function
drops it: behind ``&`` with False, ``|`` with True, or in the branch of
``where`` that is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.expressions import nodes
from cuflash.expressions.evaluate import Values
from cuflash.expressions.nodes import Node


class Outside:
    """Where the values of a graph follow from reads outside arrays.

    Parameters
    ----------
    root : Node
    values : Values
    shapes : sequence of tuple of int
        Of the arrays, by slot.
    """

    def __init__(
        self, root: Node, values: Values, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        order = nodes.in_order([root])
        self.root, self._shapes = root, shapes
        self.values = dict(zip(order, values.of(*order), strict=True))
        self._found: dict[Node, Any] = {}
        for node in order:
            self._found[node] = self._of(node)

    @property
    def pairs(self) -> Any:
        """Whether each pair's result does; broadcastable to all pairs."""
        return self._found[self.root]

    def gather(self, shape: tuple[int, ...], pair: tuple[int, ...]) -> Node:
        """The read that a pair's result follows from, one of `pairs`.

        shape : of all pairs.
        """

        def is_one(found: Any) -> bool:
            return bool(np.broadcast_to(found, shape)[pair])

        node = self.root
        while not (node.op == "gather" and is_one(self._leaves(node))):
            node = next(x for x in node.args if is_one(self._found[x]))
        return node

    def _of(self, node: Node) -> Any:
        args = node.args
        found = [self._found[x] for x in args]
        if node.op == "gather":
            found.append(self._leaves(node))
        elif node.op == "where":
            condition = self.values[args[0]]
            return found[0] | np.where(condition, found[1], found[2])
        elif node.op in _DROPPED_BY and node.kind == "bool":
            kept = [self.values[x] != _DROPPED_BY[node.op] for x in args]
            (a, b), (keeps_a, keeps_b) = found, kept[::-1]
            return (a & (b | keeps_a)) | (b & (a | keeps_b))
        return np.logical_or.reduce(np.broadcast_arrays(np.False_, *found))

    def _leaves(self, gather: Node) -> Any:
        """Whether an index of a gather is outside its axis."""
        found: Any = np.False_
        for node, size in zip(
            gather.args, self._shapes[gather.value[0]], strict=True
        ):
            index = self.values[node]
            found = found | (index < -size) | (index >= size)
        return found


# By which value of one operand the other is dropped.
_DROPPED_BY = {"bitwise_and": False, "bitwise_or": True}
