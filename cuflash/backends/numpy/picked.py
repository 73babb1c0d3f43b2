"""Chosen weights on NumPy arrays: which pairs of a part they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.arrays import Arrays
from cuflash.backends.numpy.parts import Part
from cuflash.backends.numpy.rows import Rows
from cuflash.backends.numpy.scores import (
    BLOCK_K,
    BLOCK_Q,
    PAIRS,
    Heads,
    Scores,
    heads_of_steps,
    of_heads,
    options_of,
)
from cuflash.request.problem import Call

_ALL = slice(None)


class Picked(NamedTuple):
    """Weights of some heads of a part, or their gradients.

    Attributes
    ----------
    heads : Heads
    array : ndarray, (batch, num_heads_kv, group_size, queries, keys)
        A view of those of all heads.
    query, key : ndarray of int, (queries,) and (keys,)
        The index in the part of each of its rows and columns; outside the
        part, no index.
    """

    heads: Heads
    array: np.ndarray
    query: np.ndarray
    key: np.ndarray

    def put(self, rows: np.ndarray, keys: slice, p: np.ndarray) -> None:
        """Take the weights of the rows, in ascending order, and of keys."""
        at, of_pairs = self._places(rows, keys)
        self.array[at] = p[of_pairs]

    def gradient(
        self, rows: np.ndarray, keys: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return those of pairs, summed where one is chosen twice.

        And which pairs are chosen.
        """
        at, of_pairs = self._places(rows, keys)
        lengths = len(rows), keys.stop - keys.start
        dtype = np.result_type(self.array.dtype, np.float32)
        found = np.zeros((*self.array.shape[:3], *lengths), dtype)
        own = self.array[at].astype(dtype, copy=False)
        if all(isinstance(x, slice) for x in of_pairs[1:]):
            found[of_pairs] = own
        else:
            np.add.at(found, of_pairs, own)
        counts = np.zeros(lengths, bool)
        counts[of_pairs] = True
        return found, counts

    def chooses(self, keys: slice) -> bool:
        """Whether some of the keys are chosen."""
        return bool(((self.key >= keys.start) & (self.key < keys.stop)).any())

    def visits(
        self, own: Arrays, options: dict[str, Any]
    ) -> Iterator[tuple[Scores, list[slice]]]:
        """Its heads' scores and runs of consecutive queries, if any."""
        options = dict(options)
        block_q = options.pop("block_q") or BLOCK_Q
        block_k = options.pop("block_k")
        runs = list(runs_of(self._rows(own), block_q))
        if runs:
            longest = max(x.stop - x.start for x in runs)
            block_k = block_k or max(BLOCK_K, PAIRS // longest)
            q, k = own["q"], own["k"]
            yield Scores(self.heads, q, k, block_k=block_k, **options), runs

    def flagged(self, part: Part, own: Arrays) -> Rows | None:
        """Return its rows that are the reference's, if any."""
        if part.flagged is None:
            return None
        rows = self._rows(own)
        flags = of_heads(part.flagged.rows, self.heads)[..., rows]
        rows = rows[flags.any(axis=(0, 1, 2))]
        if not rows.size:
            return None
        options = options_of(part.flagged.options, self.heads)
        return Rows(self.heads, rows, own["q"].shape[-2], options)

    def _rows(self, own: Arrays) -> np.ndarray:
        """The queries of the part that are chosen, in ascending order."""
        inside = (self.query >= 0) & (self.query < own["q"].shape[-2])
        return np.unique(self.query[inside])

    def _places(self, rows: np.ndarray, keys: slice) -> tuple[Any, Any]:
        """The index of the pairs in its array, and in an array of pairs."""
        n = np.flatnonzero(np.isin(self.query, rows))
        m = np.flatnonzero((self.key >= keys.start) & (self.key < keys.stop))
        of_rows = np.searchsorted(rows, self.query[n])
        of_keys = self.key[m] - keys.start
        return _index(n, m), _index(of_rows, of_keys)


def picked(
    call: Call, part: Part, own: Arrays, array: np.ndarray
) -> Iterator[Picked]:
    """Cut a call's weights, or their gradients, (batch, heads, ...).

    own : the part's arrays.
    """
    p, given = call.problem, call.options
    of_batch = part.heads[0]
    array = array[of_batch]
    query = _indices(given.get("queries"), p.seqlen_q, part.queries)
    key = _indices(given.get("keys"), p.seqlen_k, part.keys)
    if query.ndim == 2:
        query = np.broadcast_to(query, (p.batch, query.shape[1]))[of_batch]
        batches = [(slice(b, b + 1), x) for b, x in enumerate(query)]
    else:
        batches = [(slice(0, len(array)), query)]
    for b, rows in batches:
        if "heads" in given:
            heads = _indices(given["heads"], p.num_heads_q, _ALL)
            for place, head in enumerate(heads.tolist()):
                h, g = divmod(head, p.group_size)
                at = b, slice(h, h + 1), slice(g, g + 1)
                own_array = array[b, place][:, None, None]
                yield Picked(at, own_array, rows, key)
            continue
        groups = p.num_heads_kv, p.group_size
        of_groups = array.reshape(len(array), *groups, *array.shape[2:])
        few = own["q"][b][..., : len(rows), :]
        for first, h, g in heads_of_steps(few, own["k"][b]):
            at = slice(b.start + first.start, b.start + first.stop), h, g
            yield Picked(at, of_groups[at], rows, key)


def _indices(given: Any, length: int, own: slice) -> np.ndarray:
    """Indices within a part, of tokens or of heads; all if none is given."""
    x = np.arange(length) if given is None else np.asarray(given, np.int64)
    return np.where(x < 0, x + length, x) - (own.start or 0)


def _index(rows: np.ndarray, columns: np.ndarray) -> tuple[Any, ...]:
    """The index of all pairs of two axes; by slices it is faster."""
    ranges = [_consecutive(x) for x in (rows, columns)]
    if None in ranges:
        return ..., rows[:, None], columns
    return ..., *ranges


def _consecutive(x: np.ndarray) -> slice | None:
    if x.size and (np.diff(x) == 1).all():
        return slice(int(x[0]), int(x[-1]) + 1)
    return None


def runs_of(rows: np.ndarray, most: int) -> Iterator[slice]:
    """Cut ascending numbers into runs of consecutive ones, at most some."""
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(rows, ends):
        for start in range(0, len(run), most):
            some = run[start : start + most]
            yield slice(int(some[0]), int(some[-1]) + 1)
