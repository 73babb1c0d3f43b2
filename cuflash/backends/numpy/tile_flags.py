"""What a user's mask leaves of each tile: intervals, then pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.expressions import nodes
from cuflash.expressions.evaluate import ModArrays, Values
from cuflash.expressions.intervals import PARTLY, Extremes, Intervals
from cuflash.expressions.nodes import Node

REAL = np.dtype(np.float32)
MOST_PAIRS = 2**20  # that are tested at once

_B, _H, _QUERY, _KEY = map(nodes.index, nodes.INDICES)
_LENGTHS = tuple(map(nodes.index, nodes.LENGTHS))


class Tiles(NamedTuple):
    """The sizes of a call and of its tiles."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int


class _Axis:
    """Tiles of one axis: first tokens, and those after the last."""

    def __init__(self, seqlen: int, block: int) -> None:
        self.first = np.arange(0, seqlen, block)
        self.stop = np.minimum(self.first + block, seqlen)

    def tokens(self, tile: int) -> np.ndarray:
        return np.arange(self.first[tile], self.stop[tile], dtype=np.int32)


def tile_flags(
    mask: Node, arrays: Sequence[Any], numbers: Sequence[Any], tiles: Tiles
) -> np.ndarray:
    """The flag of each tile: 0 none, 1 partly, 2 all of its pairs visible.

    Parameters
    ----------
    mask : Node
    arrays, numbers : sequence
        Of `mod_arrays`, by slot.
    tiles : Tiles

    Returns
    -------
    ndarray of uint8, (batch or 1, heads or 1, q_tiles, k_tiles)
        Axes that the mask does not depend on have length 1.
    """
    queries = _Axis(tiles.seqlen_q, tiles.block_q)
    keys = _Axis(tiles.seqlen_k, tiles.block_k)
    flags = np.empty(
        (
            tiles.batch if "b" in mask.depends else 1,
            tiles.num_heads if "h" in mask.depends else 1,
            len(queries.first),
            len(keys.first),
        ),
        np.uint8,
    )
    given, extremes = ModArrays(arrays, numbers), Extremes(arrays)
    lengths = (np.int64(x) for x in (tiles.seqlen_q, tiles.seqlen_k))
    of_call = dict(zip(_LENGTHS, lengths, strict=True))
    for b, h in np.ndindex(flags.shape[:2]):
        of_head = of_call | {_B: np.int64(b), _H: np.int64(h)}
        ends: dict[Node, Any] = {x: (y, y) for x, y in of_head.items()}
        ends[_QUERY] = queries.first[:, None], queries.stop[:, None] - 1
        ends[_KEY] = keys.first, keys.stop - 1
        own = flags[b, h]
        own[...] = Intervals(ends, numbers, REAL, extremes).visibility(mask)
        for q_tile in np.flatnonzero((own == PARTLY).any(axis=1)).tolist():
            rows = queries.tokens(q_tile)
            leaves = of_head | {_QUERY: rows[:, None]}
            pairs = len(rows) * tiles.block_k
            for some in _parts(own[q_tile], max(1, MOST_PAIRS // pairs)):
                columns = [keys.tokens(x) for x in some]
                visible = _visible(mask, leaves, given, len(rows), columns)
                own[q_tile, some] = _of_pairs(visible, columns)
    return flags


def _parts(flags: np.ndarray, most: int) -> list[np.ndarray]:
    """The undecided tiles of a row, some at a time."""
    undecided = np.flatnonzero(flags == PARTLY)
    return np.split(undecided, np.arange(most, len(undecided), most))


def _visible(
    mask: Node,
    leaves: dict[Node, Any],
    given: ModArrays,
    rows: int,
    columns: list[np.ndarray],
) -> np.ndarray:
    """The pairs of some queries with tiles of keys, side by side."""
    key = np.concatenate(columns)
    (visible,) = Values(leaves | {_KEY: key[None]}, given, REAL).of(mask)
    return np.broadcast_to(visible, (rows, len(key)))


def _of_pairs(visible: np.ndarray, columns: list[np.ndarray]) -> np.ndarray:
    """The flags of tiles of keys from their pairs."""
    stops = np.cumsum([len(x) for x in columns])
    starts = stops - len(columns[0])
    starts[1:] = stops[:-1]
    every = np.logical_and.reduceat(visible.all(axis=0), starts)
    some = np.logical_or.reduceat(visible.any(axis=0), starts)
    return np.add(every, some, dtype=np.uint8)
