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
from collections.abc import Iterator
from typing import NamedTuple

from cuflash.expressions import bounds, nodes
from cuflash.expressions.functions import FUNCTIONS, apply
from cuflash.expressions.nodes import SCORE, Node, constant


@functools.lru_cache(maxsize=4096)
def slope(root: Node) -> Node:
    """f_s: the derivative of a score by the score that comes in.

    Forward, from the score to the root: each node moves as its operands do,
    and a branch that is not taken is left out, whatever it is.
    """
    moves: dict[Node, Node] = {SCORE: constant(1.0)}
    for node in nodes.in_order([root]):
        if node.kind == "real" and not moves.keys().isdisjoint(node.args):
            moved = _moved(node, [moves.get(x) for x in node.args])
            if moved is not None and not nodes.same_constant(moved, 0):
                moves[node] = moved
    return moves.get(root, constant(0.0))


def _moved(node: Node, dots: list[Node | None]) -> Node | None:
    """How a node moves with its operands, of which those with None stay."""
    if node.op in ("add", "subtract"):
        return _sum(dots[0], _negated(dots[1], node.op == "subtract"))
    if node.op == "negative":
        return _negated(dots[0])
    if node.op == "divide":
        return _of_quotient(node, *dots)
    row = FUNCTIONS.get(node.op)
    if row is None or row.partials is None:
        return None
    partials = row.partials(node, node.args)
    if node.op in _CHOICES:
        taken = next(x for x in partials if x is not None).args[0]
        branches = [x or constant(0.0) for x in dots[-2:]]
        return apply("where", taken, *branches)
    moved: Node | None = None
    for dot, partial in zip(dots, partials, strict=True):
        if partial is None or nodes.same_constant(partial, 0):
            continue
        if dot is not None:
            moved = _sum(moved, _moved_by(dot, partial))
    return moved


def _moved_by(dot: Node, partial: Node) -> Node:
    """A product that is 0 where either factor is.

    The other one may be infinite or NaN: the slope of what a branch that was
    not taken computes, or a function whose slope is 0 where its operand
    overflows.
    """
    for node, other in ((dot, partial), (partial, dot)):
        if node.is_constant and math.isfinite(node.value):
            return _scaled(node.value, other)
        for own, rest in _factors(node):
            return _scaled(own, _moved_by(rest, other))
    of_dot, of_partial = _is_safe(dot, partial), _is_safe(partial, dot)
    if of_dot and of_partial:
        return apply("multiply", dot, partial)
    if of_dot or of_partial:
        first, other = (partial, dot) if of_dot else (dot, partial)
        return apply("product_if", first, other)
    # Both have the product's derivatives.
    return apply(
        "where", apply("equal", dot, constant(0.0)),
        apply("product_if", dot, partial), apply("product_if", partial, dot),
    )  # fmt: skip


def _is_safe(node: Node, other: Node) -> bool:
    """Whether the other one is finite wherever a node is 0."""
    return (
        bounds.is_finite(other)
        or node is SCORE and bounds.is_finite(other, of_zero=True)
        or bounds.is_far_from_zero(node)
    )  # fmt: skip


_CHOICES = "where", "minimum", "maximum"


def _sum(first: Node | None, other: Node | None) -> Node | None:
    if first is None or other is None:
        return other if first is None else first
    if first is other:  # as of x * x
        return _scaled(2.0, first)
    for own, node in _factors(first):
        for factor, term in _factors(other):
            if own == factor and own != -1:
                both = _sum(node, term)
                return both and _scaled(own, both)
    if other.op == "negative":
        return apply("subtract", first, other.args[0])
    return apply("add", first, other)


def _negated(node: Node | None, asked: bool = True) -> Node | None:
    return _scaled(-1.0, node) if asked and node is not None else node


def _of_quotient(
    quotient: Node, dot: Node | None, of_divisor: Node | None
) -> Node | None:
    """(u' - v' q) / v of q = u / v: a quotient by v again.

    0 where u' and v' are, also if v is.
    """
    divisor = quotient.args[1]
    if of_divisor is not None:
        dot = _sum(dot, _negated(_moved_by(of_divisor, quotient)))
    if dot is None:
        return None
    if divisor.is_constant:
        return _product(dot, apply("divide", constant(1.0), divisor))
    moved = apply("divide", dot, divisor)
    if dot.is_constant or bounds.is_far_from_zero(divisor):
        return moved
    inverse = apply("divide", constant(1.0), divisor)
    return apply(
        "where", apply("equal", divisor, constant(0.0)),
        apply("product_if", dot, inverse), moved,
    )  # fmt: skip


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
            found[arg] = _sum(found.get(arg), term) or term
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
    for own, other in _factors(adjoint):
        return _scaled(own, _product(other, partial))
    for own, other in _factors(partial):
        return _scaled(own, _product(adjoint, other))
    safe = _is_safe(adjoint, partial)
    return apply("multiply" if safe else "product_if", adjoint, partial)


# Factors between these are multiplied with each other.
_MODERATE = 2.0**-60, 2.0**60


def _scaled(factor: float, node: Node) -> Node:
    """A multiple of a node, whose own constant factors join."""
    least, most = _MODERATE
    for own, other in _factors(node):
        if least <= abs(factor * own) <= most:
            return _scaled(factor * own, other)
    if factor == -1:
        return apply("negative", node)
    return apply("multiply", constant(factor), node)


def _factors(node: Node) -> Iterator[tuple[float, Node]]:
    """The constant factor of a node, and the other one, if there is one."""
    if node.op == "negative":
        yield -1.0, node.args[0]
    elif node.op == "multiply":
        least, most = _MODERATE
        for own, other in (node.args, node.args[::-1]):
            if own.is_constant and least <= abs(own.value) <= most:
                yield own.value, other
                return


def _moving(root: Node) -> set[Node]:
    """The nodes that may have a derivative by the score or a gather."""
    found: set[Node] = set()
    for node in nodes.in_order([root]):
        leaf = node.op in ("score", "gather")
        moved = node.op in FUNCTIONS and not found.isdisjoint(node.args)
        if node.kind == "real" and (leaf or moved):
            found.add(node)
    return found
