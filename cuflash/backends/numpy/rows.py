"""Rows of a part, taken from its arrays, and written into its results.

The rows that are flagged (`flagged`) have any places; the reference
computes them alone, as a few queries of a longer sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash.backends.numpy.arrays import KEYS, OPTIONS, Arrays
from cuflash.backends.numpy.flagged import Flagged
from cuflash.backends.numpy.scores import Heads, of_heads, options_of
from cuflash.reference.options import Queries

_ALL = slice(None)


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
        for name in ("bias", "mask", "segment_ids_q"):
            if name in options:
                x = options[name]
                self.options[name] = x[self._at(name, x)]

    def of(self, arrays: Arrays) -> Arrays:
        """Take these rows and heads of a part's arrays, or tangents."""
        found = {}
        for name, array in arrays.items():
            x = of_heads(array, self.heads)
            found[name] = x if name in KEYS else x[self._at(name, x)]
        return found

    def put(self, results: Arrays, found: Arrays) -> None:
        """Write what these rows have of their own; add to all other sums."""
        for name, x in found.items():
            total = of_heads(results[name], self.heads)
            if name in KEYS:
                total += x.sum(axis=2, keepdims=True)  # of a group
            elif name in OPTIONS:
                total[self._at(name, total)] += x
            else:
                total[self._at(name, total)] = x

    def add(self, results: Arrays, found: Arrays) -> None:
        """Add to results that have 0 in what these rows have of their own."""
        for name, x in found.items():
            total = of_heads(results[name], self.heads)
            if name in KEYS:
                total += x.sum(axis=2, keepdims=True)  # of a group
            else:
                total[self._at(name, total)] += x

    def _at(self, name: str, x: np.ndarray) -> Any:
        """The index of these rows; of all of an option that has no rows."""
        if x.ndim == 4:
            return (..., self.index)
        if name in OPTIONS and (x.ndim == 3 or x.shape[-2] == 1):
            return ...
        return (..., self.index, _ALL)


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
