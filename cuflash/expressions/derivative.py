"""Derivatives of a recorded score, as graphs again.

With X the score that comes in and f what comes out: f_s = df/dX, with which
dS_X = f_s dS, and f_a = df/d(gather), whose scatter of f_a dS is an array's
gradient. `where`, `minimum`, `maximum` take the branch that was taken.

Along a direction in which X moves with W_X and arrays with a', any of these
graphs moves with its `Differential`: that of f is W, those of f_s and f_a are
what second derivatives need.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

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


class Differential(NamedTuple):
    """How a graph moves: by_score W_X + the sum of each by_gathers times a'.

    Attributes
    ----------
    by_score : Node
    by_gathers : dict of Node to Node
        Of the gathers of arrays that move; those that are 0 are left out.
    """

    by_score: Node
    by_gathers: dict[Node, Node]

    @property
    def is_zero(self) -> bool:
        """Whether it is 0 whatever moves."""
        by_score = nodes.same_constant(self.by_score, 0)
        return by_score and not self.by_gathers

    @property
    def roots(self) -> tuple[Node, ...]:
        """All that it is computed from."""
        indices = (y for x in self.by_gathers for y in x.args)
        return self.by_score, *self.by_gathers.values(), *indices


def differential(root: Node, slots: tuple[int, ...]) -> Differential:
    """That of a graph; `slots` are those of the arrays that move."""
    return Differential(slope(root), of_gathers(root, slots) if slots else {})


@functools.lru_cache(maxsize=4096)
def _adjoints(root: Node) -> dict[Node, Node]:
    """The derivatives of the root by each node, those that are 0 left out."""
    found: dict[Node, Node] = {root: constant(1.0)}
    moving = _moving(root)
    for node in reversed(nodes.in_order([root])):
        adjoint = found.get(node)
        if adjoint is None or node.op not in FUNCTIONS:
            continue
        partials = FUNCTIONS[node.op].partials
        if partials is None:
            continue
        by_args = partials(node, node.args)
        for arg, partial in zip(node.args, by_args, strict=True):
            if partial is None or arg not in moving:
                continue
            term = _product(adjoint, partial)
            if nodes.same_constant(term, 0):
                continue
            known = found.get(arg)
            if known is None:
                found[arg] = term
            elif known is term:  # as of x * x
                found[arg] = _scaled(2.0, term)
            else:
                found[arg] = apply("add", known, term)
    return found


def _product(adjoint: Node, partial: Node) -> Node:
    """0 where the adjoint is, though the partial derivative may be NaN.

    And where a branch was not taken, though the adjoint may be infinite.
    """
    if adjoint.is_constant:
        return _scaled(adjoint.value, partial)
    if partial.op == "where":
        taken, *branches = partial.args
        if all(nodes.same_constant(x, 0) or nodes.same_constant(x, 1)
               for x in branches):  # fmt: skip
            none = constant(0.0)
            return apply("where", taken, *(
                adjoint if x.value else none for x in branches
            ))  # fmt: skip
    if partial.is_constant and math.isfinite(partial.value):
        return _scaled(partial.value, adjoint)
    return apply("product_if", adjoint, partial)


# Factors between these are multiplied with each other.
_MODERATE = 2.0**-60, 2.0**60


def _scaled(factor: float, node: Node) -> Node:
    """A multiple of a node, whose own constant factors join."""
    least, most = _MODERATE
    if node.op == "negative":
        return _scaled(-factor, node.args[0])
    if node.op == "multiply":
        for own, other in (node.args, node.args[::-1]):
            if own.is_constant and least <= abs(factor * own.value) <= most:
                return _scaled(factor * own.value, other)
    return apply("multiply", constant(factor), node)


def _moving(root: Node) -> set[Node]:
    """The nodes that may have a derivative by the score or a gather."""
    found: set[Node] = set()
    for node in nodes.in_order([root]):
        leaf = node.op in ("score", "gather")
        moved = node.op in FUNCTIONS and not found.isdisjoint(node.args)
        if node.kind == "real" and (leaf or moved):
            found.add(node)
    return found
