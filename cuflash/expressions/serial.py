"""Graphs as text, which compiled programs keep, and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable

from cuflash.expressions import nodes
from cuflash.expressions.nodes import Node

Roots = tuple[tuple[str, Node], ...]


def dumps(roots: Iterable[tuple[str, Node]]) -> str:
    """The text of named graphs."""
    named = dict(roots)
    order = nodes.in_order(named.values())
    places = {x: i for i, x in enumerate(order)}
    rows = [
        (x.op, x.kind, [places[y] for y in x.args], x.value) for x in order
    ]
    names = {name: places[x] for name, x in named.items()}
    return json.dumps([names, rows], separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def loads(text: str) -> Roots:
    """The named graphs of a text."""
    names, rows = json.loads(text)
    found: list[Node] = []
    for op, kind, places, value in rows:
        args = tuple(found[x] for x in places)
        kept = tuple(value) if isinstance(value, list) else value
        found.append(nodes.make(op, kind, args, kept))
    return tuple((name, found[x]) for name, x in names.items())
