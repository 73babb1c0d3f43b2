"""Parts of a graph that built-in options compute, faster than a text does.

A mask's conditions that bound the distance q_idx - kv_idx are a causal mask
or a window; a score that first goes through ``c * tanh(score / c)`` has a
softcap. What is left of the graph, if anything is, stays the user's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from cuflash.expressions import nodes
from cuflash.expressions.functions import apply
from cuflash.expressions.nodes import SCORE, Node


class Distance(NamedTuple):
    """``at_least <= q_idx - kv_idx <= at_most``; None for no bound."""

    at_least: int | None
    at_most: int | None


@functools.lru_cache(maxsize=4096)
def distance_bounds(mask: Node) -> tuple[Distance, Node | None]:
    """The bounds that a mask sets to the distance, and the rest of it."""
    lows: list[int] = []
    highs: list[int] = []
    rest: Node | None = None
    for condition in _conditions(mask):
        found = _bounds_of(condition)
        if found is None:
            rest = condition if rest is None else apply(
                "bitwise_and", rest, condition
            )  # fmt: skip
            continue
        lows += [x.at_least for x in found if x.at_least is not None]
        highs += [x.at_most for x in found if x.at_most is not None]
    bounds = Distance(max(lows, default=None), min(highs, default=None))
    return bounds, rest


def _conditions(mask: Node) -> list[Node]:
    """The conditions that all have to hold, in order."""
    found, stack = [], [mask]
    while stack:
        node = stack.pop()
        if node.op == "bitwise_and":
            stack += reversed(node.args)
        else:
            found.append(node)
    return found


# a < b is a - b <= -1 of ints; the others are made of the same.
_AS_DIFFERENCE = {
    "less": (1, 1), "less_equal": (1, 0),
    "greater": (-1, 1), "greater_equal": (-1, 0),
}  # fmt: skip


def _bounds_of(condition: Node) -> list[Distance] | None:
    """The bounds of a comparison of ints that depends on the distance."""
    if condition.op not in _AS_DIFFERENCE:
        return None
    sign, margin = _AS_DIFFERENCE[condition.op]
    first, second = condition.args[::sign]
    if first.kind != "int" or second.kind != "int":
        return None
    # Now first - second + margin <= 0.
    if first.op == "absolute":
        inner = first.args[0]
        both = inner, apply("negative", inner)
        found = [_bound(x, second, margin) for x in both]
    else:
        found = [_bound(first, second, margin)]
    return None if None in found else [x for x in found if x]


def _bound(first: Node, second: Node, margin: int) -> Distance | None:
    form = _affine(apply("subtract", first, second))
    if form is None:
        return None
    of_query, of_key, added = form
    most = -(added + margin)  # of of_query q + of_key k
    if (of_query, of_key) == (1, -1):
        return Distance(None, most)
    if (of_query, of_key) == (-1, 1):
        return Distance(-most, None)
    return None


@functools.lru_cache(maxsize=4096)
def _affine(root: Node) -> tuple[int, int, int] | None:
    """(a, b, c) of ``a q_idx + b kv_idx + c``, None of anything else.

    Also of an int's conversion, and of sums of these.
    """
    known: dict[Node, tuple[int, int, int] | None] = {}
    for node in nodes.in_order([root]):
        args = [known[x] for x in node.args]
        known[node] = None
        if node.is_constant and node.kind == "int":
            known[node] = 0, 0, node.value
        elif node.op == "index" and node.value in ("q_idx", "kv_idx"):
            of_query = node.value == "q_idx"
            known[node] = int(of_query), int(not of_query), 0
        elif node.op == "to_real":
            (known[node],) = args
        elif None in args or node.op not in ("add", "subtract", "negative"):
            continue
        else:
            signs = {"add": (1, 1), "subtract": (1, -1), "negative": (-1,)}
            terms = [
                [sign * x for x in form or ()]
                for sign, form in zip(signs[node.op], args, strict=True)
            ]
            a, b, c = map(sum, zip(*terms, strict=True))
            known[node] = a, b, c
    return known[root]


def shared_by(gather: Node) -> str | None:
    """What its indices depend on, so that pairs that have it in common share.

    "all": neither q_idx nor kv_idx; "q_idx" or "kv_idx" alone; "distance":
    q_idx - kv_idx alone; None: anything else.
    """
    varying = [x for x in gather.args if not x.of_head]
    depends = {y for x in varying for y in x.depends}
    if "score" in depends:
        return None
    of_pair = depends & {"q_idx", "kv_idx"}
    if len(of_pair) < 2:
        return of_pair.pop() if of_pair else "all"
    return "distance" if all(map(_of_distance, varying)) else None


@functools.lru_cache(maxsize=4096)
def of_distance(roots: tuple[Node, ...]) -> tuple[Node, ...]:
    """The largest parts that pairs with the same q_idx - kv_idx share."""
    found: dict[Node, None] = {}
    stack, seen = [*roots], set()
    while stack:
        node = stack.pop()
        if node in seen or node.of_head:
            continue
        seen.add(node)
        both = node.depends.issuperset(("q_idx", "kv_idx"))
        if both and "score" not in node.depends and _of_distance(node):
            found[node] = None
        else:
            stack += node.args
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _of_distance(root: Node) -> bool:
    """Whether q_idx and kv_idx occur in q_idx - kv_idx alone."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if node in seen or node.of_head:
            continue
        seen.add(node)
        form = _affine(node)
        if form is not None and form[0] == -form[1]:
            continue
        if node.op == "index":
            return False
        stack += node.args
    return True


@functools.lru_cache(maxsize=4096)
def softcap(score: Node) -> tuple[float, Node]:
    """The softcap that a score goes through first, 0 for none, and the rest.

    The rest takes the capped score.
    """
    order = nodes.in_order([score])
    uses = [x for x in order if SCORE in x.args]
    caps = {_cap_of(use, order) for use in uses}
    if len(caps) != 1 or None in caps or score is SCORE:
        return 0.0, score
    ((cap, capped),) = (x for x in caps if x)
    return cap, _replaced(score, capped, SCORE)


def with_softcap(cap: float, score: Node | None) -> Node:
    """The graph of a score that goes through a softcap first: its inverse."""
    size = nodes.constant(cap)
    inner = apply("tanh", apply("divide", SCORE, size))
    capped = apply("multiply", size, inner)
    return capped if score is None else _replaced(score, SCORE, capped)


def _cap_of(use: Node, order: list[Node]) -> tuple[float, Node] | None:
    """(c, ``c * tanh(score / c)``) of a node ``score / c``, else None."""
    inner = _ratio(use)
    if inner is None:
        return None
    tanhs = [x for x in order if use in x.args]
    if len(tanhs) != 1 or tanhs[0].op != "tanh":
        return None
    products = [x for x in order if tanhs[0] in x.args]
    if len(products) != 1 or products[0].op != "multiply":
        return None
    constants = [x.value for x in products[0].args if x.is_constant]
    if constants != [inner] or inner <= 0:
        return None
    return inner, products[0]


def _ratio(node: Node) -> float | None:
    if node.op == "divide" and node.args[0] is SCORE:
        return node.args[1].value if node.args[1].is_constant else None
    return None


def _replaced(root: Node, old: Node, new: Node) -> Node:
    """The graph with a node in place of another."""
    found: dict[Node, Node] = {old: new}
    for node in nodes.in_order([root]):
        if node in found:
            continue
        args = tuple(found[x] for x in node.args)
        found[node] = nodes.with_args(node, args)
    return found[root]
