"""Scores to which something is added that is affine in the key, tile by tile.

``score - slopes[h] * abs(q_idx - kv_idx)`` is one: in a tile of pairs that all
lie on one side of the diagonal, it is the score, a term of the query, and
``slopes[h] * kv_idx`` or its opposite. A kernel then adds a multiple of the
key's number to a pair, and the query's term once a row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from cuflash.expressions import nodes
from cuflash.expressions.functions import apply
from cuflash.expressions.nodes import SCORE, Node, constant


class Affine(NamedTuple):
    """f(x) = x + added.

    Attributes
    ----------
    added : Node
        Of the head, the query and the key.
    step : Node
        Its derivative by the key. In a tile in which no edge is 0 or changes
        its sign, it is the same for all pairs.
    edges : tuple of Node
        Each is affine in the query and in the key.
    """

    added: Node
    step: Node
    edges: tuple[Node, ...]


@functools.lru_cache(maxsize=4096)
def affine(score: Node) -> Affine | None:
    """The parts of a score, in which `reals.in_reals` moved conversions.

    None for any other score, and where arrays are read for each pair.
    """
    added = _added(score)
    if added is None or "kv_idx" not in added.depends:
        return None
    if not all(x.of_head for x in nodes.gathers([added])):
        return None
    order = nodes.in_order([added])
    everywhere = _everywhere(order)
    steps: dict[Node, Node | None] = {}
    edges: dict[Node, None] = {}
    for node in order:
        if node.kind != "real":
            continue
        if "kv_idx" not in node.depends:
            steps[node] = constant(0.0)
            continue
        edge = _edge(node) if everywhere.issuperset(node.args) else None
        if edge is not None:
            edges[edge] = None
        steps[node] = _step(node, [steps.get(x) for x in node.args], edge)
    step = steps[added]
    return None if step is None else Affine(added, step, tuple(edges))


def _added(score: Node) -> Node | None:
    """What a score adds to the one that comes in."""
    found: dict[Node, Node] = {}
    zero = constant(0.0)
    for node in nodes.in_order([score]):
        if node is SCORE:
            found[node] = zero
        if "score" not in node.depends or node is SCORE:
            continue
        moving = [x for x in node.args if "score" in x.depends]
        if node.op not in ("add", "subtract") or len(moving) != 1:
            return None
        inner, first = found[moving[0]], node.args[0]
        if node.op == "add":
            other = node.args[1] if first is moving[0] else first
            found[node] = other if inner is zero else apply(
                "add", inner, other
            )  # fmt: skip
        elif first is not moving[0]:
            return None
        elif inner is zero:
            found[node] = apply("negative", node.args[1])
        else:
            found[node] = apply("subtract", inner, node.args[1])
    return found.get(score)


def _everywhere(order: list[Node]) -> set[Node]:
    """The reals that are affine in the query and the key of all pairs."""
    found: set[Node] = set()
    for node in order:
        known = [x in found for x in node.args]
        of_heads = [x.of_head for x in node.args]
        if node.kind == "real" and (
            node.of_head
            or node.op == "to_real" and node.args[0].op == "index"
            or node.op in ("add", "subtract", "negative") and all(known)
            or node.op == "multiply" and all(known) and any(of_heads)
        ):  # fmt: skip
            found.add(node)
    return found


def _edge(node: Node) -> Node | None:
    """What has one sign wherever one branch of a node is taken."""
    if node.op == "absolute":
        return node.args[0]
    if node.op in ("minimum", "maximum"):
        return apply("subtract", *node.args)
    return None


def _step(
    node: Node, steps: list[Node | None], edge: Node | None
) -> Node | None:
    """The derivative of a node by the key, if that is known."""
    if node.op == "to_real":
        return constant(1.0) if node.args[0].op == "index" else None
    if None in steps:
        return None
    known = [x for x in steps if x is not None]
    if node.op in ("add", "subtract", "negative"):
        return apply(node.op, *known)
    if node.op == "multiply":
        for x, step, factor in zip(
            node.args, known, node.args[::-1], strict=True
        ):
            if factor.of_head and not x.of_head:
                return apply("multiply", step, factor)
    if node.op == "divide" and node.args[1].of_head:
        return apply("divide", known[0], node.args[1])
    if node.op == "absolute" and edge is not None:
        return apply("multiply", known[0], apply("sign", edge))
    if node.op in ("minimum", "maximum") and edge is not None:
        first, second = known if node.op == "minimum" else known[::-1]
        return apply("where", apply("less", edge, constant(0.0)), first,
                     second)  # fmt: skip
    return None
