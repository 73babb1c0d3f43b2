"""What a user's function computes, as a graph of nodes.

A node is stored once: equal nodes are one object, so that two functions that
record the same graph share kernels, and a node is its own key in any cache.
Constants are folded when a node is made.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any, Literal

Kind = Literal["bool", "int", "real"]
KINDS: tuple[Kind, ...] = ("bool", "int", "real")  # each holds those before

# The leaves that differ from pair to pair, or from head to head.
INDICES = ("b", "h", "q_idx", "kv_idx")
LENGTHS = ("seqlen_q", "seqlen_k")


class Node:
    """An operation on nodes, or a leaf.

    Attributes
    ----------
    op : str
        ``"constant"``, ``"score"``, ``"index"`` (of `INDICES` or `LENGTHS`),
        ``"number"``, ``"size"``, ``"gather"``, or a name of
        `functions.FUNCTIONS`.
    kind : str
        The type of its value: bool, int or real.
    args : tuple of Node
        Operands; the indices of a gather.
    value : object
        A constant's value, an index's name, a number's slot; (slot, axis) of
        an array's size; (slot, dtype name) of a gather.
    depends : frozenset of str
        Of the names in `INDICES` and ``"score"``, those that it depends on.
    """

    __slots__ = ("__weakref__", "args", "depends", "kind", "op", "value")

    op: str
    kind: Kind
    args: tuple[Node, ...]
    value: Any
    depends: frozenset[str]

    def __repr__(self) -> str:
        if self.op == "constant":
            return repr(self.value)
        names = [str(self.value)] if self.value is not None else []
        return f"{self.op}({', '.join(names + [x.op for x in self.args])})"

    @property
    def is_constant(self) -> bool:
        return self.op == "constant"

    @property
    def of_head(self) -> bool:
        """Whether all pairs of a head share its value."""
        return self.depends.isdisjoint(("q_idx", "kv_idx", "score"))


_KNOWN: weakref.WeakValueDictionary[tuple, Node] = (
    weakref.WeakValueDictionary()
)
_LOCK = threading.Lock()


def make(
    op: str, kind: Kind, args: tuple[Node, ...] = (), value: Any = None
) -> Node:
    """The node with these attributes, not folded."""
    # A node keeps its operands alive, so their ids stay theirs. A constant's
    # repr tells -0.0 from 0.0 and knows a NaN again.
    content = repr(value) if op == "constant" else value
    key = op, kind, content, tuple(map(id, args))
    with _LOCK:
        node = _KNOWN.get(key)
        if node is None:
            node = Node()
            node.op, node.kind, node.args, node.value = op, kind, args, value
            node.depends = frozenset().union(*(x.depends for x in args))
            if op == "score" or op == "index" and value in INDICES:
                node.depends |= {value or "score"}
            _KNOWN[key] = node
    return node


def constant(value: bool | int | float) -> Node:
    """A number that is part of the kernel's text."""
    if isinstance(value, bool):
        return make("constant", "bool", (), value)
    if isinstance(value, int):
        return make("constant", "int", (), value)
    return make("constant", "real", (), float(value))


def index(name: str) -> Node:
    return make("index", "int", (), name)


SCORE = make("score", "real")


def in_order(roots: Iterable[Node], known: Container[Node] = ()) -> list[Node]:
    """All nodes that roots need, operands before what uses them.

    Operands that are known are left out, and so is what they need.

    Without recursion: a graph may be deeper than Python's stack.
    """
    found: dict[Node, None] = {}
    stack = [*reversed([*roots])]
    while stack:
        node = stack[-1]
        missing = [x for x in node.args if x not in found and x not in known]
        if missing:
            stack += reversed(missing)
        else:
            found.setdefault(node)
            stack.pop()
    return [*found]


def with_args(node: Node, args: tuple[Node, ...]) -> Node:
    """The same operation on other operands, not folded."""
    if args == node.args:
        return node
    return make(node.op, node.kind, args, node.value)


def gathers(roots: Iterable[Node]) -> Iterator[Node]:
    return (x for x in in_order(roots) if x.op == "gather")


def widest(nodes: Iterable[Node]) -> Kind:
    """The kind that holds the values of all of them."""
    return max((x.kind for x in nodes), key=KINDS.index)


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def same_constant(node: Node, value: float) -> bool:
    """Whether a node is the constant `value`, of any kind."""
    return node.is_constant and node.value == value
