"""Derivatives of a recorded score, as graphs again.

With X the score that comes in and f what comes out: f_s = df/dX, with which
dS_X = f_s dS, and f_a = df/d(gather), whose scatter of f_a dS is an array's
gradient. `where`, `minimum`, `maximum` take the branch that was taken.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from cuflash.expressions import nodes
from cuflash.expressions.functions import FUNCTIONS, apply
from cuflash.expressions.nodes import SCORE, Node, constant


@functools.lru_cache(maxsize=4096)
def slope(root: Node) -> Node:
    """f_s: the derivative of a score by the score that comes in."""
    return _adjoints(root).get(SCORE, constant(0.0))


@functools.lru_cache(maxsize=4096)
def of_gathers(root: Node, slots: tuple[int, ...]) -> dict[Node, Node]:
    """f_a of each gather of the arrays with these slots, if it is not 0."""
    return {
        node: by_it
        for node, by_it in _adjoints(root).items()
        if node.op == "gather" and node.value[0] in slots
    }


@functools.lru_cache(maxsize=4096)
def _adjoints(root: Node) -> dict[Node, Node]:
    """The derivatives of the root by each node, those that are 0 left out."""
    found: dict[Node, Node] = {root: constant(1.0)}
    for node in reversed(nodes.in_order([root])):
        adjoint = found.get(node)
        if adjoint is None or node.op not in FUNCTIONS:
            continue
        partials = FUNCTIONS[node.op].partials
        if partials is None:
            continue
        by_args = partials(node, node.args)
        for arg, partial in zip(node.args, by_args, strict=True):
            if partial is None or not _moves(arg):
                continue
            term = _product(adjoint, partial)
            if nodes.same_constant(term, 0):
                continue
            known = found.get(arg)
            found[arg] = term if known is None else apply("add", known, term)
    return found


def _product(adjoint: Node, partial: Node) -> Node:
    """0 where the adjoint is, though the partial derivative may be NaN."""
    if adjoint.is_constant:
        return apply("multiply", adjoint, partial)
    if partial.is_constant:
        return apply("multiply", partial, adjoint)
    return apply("product_if", adjoint, partial)


@functools.lru_cache(maxsize=65536)
def _moves_alone(node: Node) -> bool:
    return node.op == "score" or node.op == "gather" and node.kind == "real"


def _moves(node: Node) -> bool:
    """Whether a node may have a derivative by the score or a gather."""
    return node.kind == "real" and node in _moving(node)


@functools.lru_cache(maxsize=4096)
def _moving(root: Node) -> frozenset[Node]:
    """Of the nodes that a root needs, those that may move."""
    found: set[Node] = set()
    for node in nodes.in_order([root]):
        moved = node.kind == "real" and any(x in found for x in node.args)
        if _moves_alone(node) or moved and node.op in FUNCTIONS:
            found.add(node)
    return frozenset(found)


def reach(roots: Iterable[Node]) -> frozenset[int]:
    """The slots of the arrays that roots read."""
    return frozenset(x.value[0] for x in nodes.gathers(roots))
