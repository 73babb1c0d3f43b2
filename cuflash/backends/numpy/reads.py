"""Finds reads outside a user's arrays, for calls with CUFLASH_CHECK=1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cuflash.backends.numpy import caches
from cuflash.backends.numpy.arrays import operands, options
from cuflash.backends.numpy.parts import sequences
from cuflash.backends.numpy.scores import Scores, steps
from cuflash.expressions import nodes
from cuflash.expressions.evaluate import Values
from cuflash.expressions.nodes import Node
from cuflash.expressions.outside import Outside
from cuflash.reference.options import Tile
from cuflash.request.problem import Call


class Read(NamedTuple):
    """A read outside an array that a pair's result follows from.

    Attributes
    ----------
    role : str
        ``"mask_mod"``: it decides whether the pair is visible.
        ``"score_mod"``: the pair is visible.
    gather : Node
    indices : tuple of int
        What it reads the array at.
    pair : dict of str to int
        b, h, q_idx and kv_idx.
    """

    role: str
    gather: Node
    indices: tuple[int, ...]
    pair: dict[str, int]


@np.errstate(all="ignore")
def find(call: Call) -> Read | None:
    """The first such read of a call's functions, None if there is none."""
    p = call.problem
    roots = [x for x in (p.score_mod, p.mask_mod) if x is not None]
    if not any(nodes.gathers(roots)):
        return None
    of_call = caches.sequences if p.kvcache else _of_arrays
    for q, k, own in of_call(call):
        for scores, rows in steps(q, k, **own):
            for queries in rows:
                for tile, visible in scores.tiles_of_options(queries):
                    found = _of_tile(scores, tile, visible)
                    if found is not None:
                        return found
    return None


def _of_arrays(call: Call) -> caches.Sequences:
    arrays = operands(call, "q", "k")
    for part in sequences(call, options(call)):
        own = part.of(arrays)
        yield own["q"], own["k"], part.options


def _of_tile(
    scores: Scores, tile: Tile, visible: np.ndarray | None
) -> Read | None:
    """That of a tile, of whose pairs other masks leave some."""
    expressions = scores.expressions
    assert expressions is not None
    leaves = expressions.leaves(tile)
    shape = (*scores.q.shape[:3], len(leaves[_QUERY]), leaves[_KEY].size)
    for role, root in _functions(scores):
        if "score" in root.depends:
            leaves[nodes.SCORE] = scores.before_mod(tile)[0]
        given, real = expressions.recorded.given, expressions.real
        values = Values(leaves, given, real)
        outside = Outside(root, values, [x.shape for x in given.arrays])
        bad = outside.pairs if visible is None else outside.pairs & visible
        bad = np.broadcast_to(bad, shape)
        if bad.any():
            at = tuple(map(int, np.argwhere(bad)[0]))
            known = leaves | outside.values
            own = {x: np.broadcast_to(y, shape)[at] for x, y in known.items()}
            gather = outside.gather(shape, at)
            return Read(
                role,
                gather,
                tuple(int(own[x]) for x in gather.args),
                {x: int(own[nodes.index(x)]) for x in nodes.INDICES},
            )
        if role == "mask_mod":
            of_user = outside.values[root]
            visible = of_user if visible is None else visible & of_user
    return None


def _functions(scores: Scores) -> Iterator[tuple[str, Node]]:
    """The mask first: the score of a masked pair may be anything."""
    assert scores.expressions is not None
    recorded = scores.expressions.recorded
    for role, root in (
        ("mask_mod", recorded.mask),
        ("score_mod", recorded.score),
    ):
        if root is not None:
            yield role, root


_QUERY, _KEY = nodes.index("q_idx"), nodes.index("kv_idx")
