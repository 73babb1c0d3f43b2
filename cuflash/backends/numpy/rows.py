"""Rows of a part, taken from its arrays, and written into its results.

The rows that are flagged (`numpy_flagged`) have any places; the reference
computes them alone, as a few queries of a longer sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash.backends.numpy.flagged import Flagged
from cuflash.backends.numpy.scores import Heads, of_heads, options_of
from cuflash.backends.numpy.tangents import Direction
from cuflash.reference.options import Queries


class Rows:
    """Some rows of some heads of a part.

    options : those of the part's call, for these rows.
    """

    def __init__(
        self,
        heads: Heads,
        index: np.ndarray,
        seqlen_q: int,
        options: dict[str, Any],
    ) -> None:
        self.heads, self.index = heads, index
        self.options = options | {"queries": Queries(index, seqlen_q)}
        for name in ("bias", "mask"):
            if name in options:
                self.options[name] = self.pairs_of(options[name])
        if "segment_ids_q" in options:
            ids = options["segment_ids_q"]
            self.options["segment_ids_q"] = ids[..., index]

    def rows_of(self, x: np.ndarray) -> np.ndarray:
        """Take the rows of q, or of what has its axes, of these heads."""
        x = of_heads(x, self.heads)
        return x[..., self.index] if x.ndim == 4 else x[..., self.index, :]

    def keys_of(self, x: np.ndarray) -> np.ndarray:
        """Take k, or what has its axes, of these heads."""
        return of_heads(x, self.heads)

    def pairs_of(self, x: np.ndarray) -> np.ndarray:
        """Take the rows of a bias or mask of these heads."""
        return x if x.shape[-2] == 1 else x[..., self.index, :]

    def direction_of(self, x: Direction) -> Direction:
        """Take the tangents of these rows and heads."""
        q, k, v, bias, sink = x.of(self.heads)
        return Direction(
            None if q is None else q[..., self.index, :],
            *(k, v),
            None if bias is None else self.pairs_of(bias),
            sink,
        )

    def write(self, results: np.ndarray, rows: np.ndarray) -> None:
        """Write the rows of a result that has the axes of q."""
        own = of_heads(results, self.heads)
        if own.ndim == 4:
            own[..., self.index] = rows
        else:
            own[..., self.index, :] = rows

    def add(self, total: np.ndarray, own: np.ndarray) -> None:
        """Add what these rows give to a gradient that all rows add to."""
        part = of_heads(total, self.heads)
        part += own

    def add_pairs(self, total: np.ndarray, own: np.ndarray) -> None:
        """The same for the gradient of a bias."""
        part = of_heads(total, self.heads)
        if part.shape[-2] == 1:
            part += own
        else:
            part[..., self.index, :] += own


def cut(flagged: Flagged) -> Iterator[Rows]:
    """Return the flagged rows; heads that have the same ones share a call."""
    for b, of_batch in _alike(flagged.rows):
        for h, of_head in _alike(of_batch[0]):
            for g, (own, *_) in _alike(of_head[0]):
                if own.any():
                    options = options_of(flagged.options, (b, h, g))
                    index = np.flatnonzero(own)
                    yield Rows((b, h, g), index, len(own), options)


def _alike(flags: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Cut axis 0: into one piece if all are the same, else into ones."""
    if (flags == flags[:1]).all():
        yield slice(None), flags
        return
    for number in range(len(flags)):
        one = slice(number, number + 1)
        yield one, flags[one]
