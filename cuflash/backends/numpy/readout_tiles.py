"""Numbers inside the softmax on NumPy arrays, in tiles: `readouts`' equations.

Of `cuflash.reference.readouts`, in the arrays' own precision, for inputs that
are BOUNDED (`kinds.Kind`). Arrays and options are those of `tiles`; numbers of
keys are (batch, num_heads_kv, group_size, seqlen_k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.arrays import Arrays
from cuflash.backends.numpy.picked import Picked
from cuflash.backends.numpy.scores import Heads, Scores, of_heads, steps
from cuflash.backends.numpy.softmax import Shift
from cuflash.reference.options import Tile

# g of pairs, and which of them count (None: all): of heads, the indices of
# queries, keys, and log P.
Counts = np.ndarray | None
Factor = Callable[
    [Heads, np.ndarray, slice, np.ndarray], tuple[np.ndarray, Counts]
]

# What a part's scores are, and of which of its queries: as `scores.steps`.
Steps = Iterator[tuple[Scores, list[slice]]]

# exp() of it is 0 in float64 too, and it is finite, so 0 times it is 0.
LEAST_LOGARITHM = -1000.0


class RowNumbers(NamedTuple):
    """Numbers of a part's queries, with the axes of its lse.

    factor : what their weights are multiplied by.
    counts : which of them count.
    """

    factor: np.ndarray
    counts: np.ndarray


class Maxima(NamedTuple):
    """The largest r_i P_ij of each key, and its query; -1 without one."""

    value: np.ndarray
    row: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Maxima:
        """Return those of no queries."""
        return cls(np.full(shape, -np.inf), np.full(shape, -1))

    def add(self, at: Any, value: np.ndarray, row: np.ndarray) -> None:
        """Take those of other queries, in place, of heads and keys.

        Of equal ones that of the first query; of NaN before all numbers.
        """
        own, last = self.value[at], self.row[at]
        nan, own_nan = np.isnan(value), np.isnan(own)
        better = (value > own) | (nan & ~own_nan)
        better |= ((value == own) | (nan & own_nan)) & (row < last)
        better = (row >= 0) & (better | (last < 0))
        self.value[at] = np.where(better, value, own)
        self.row[at] = np.where(better, row, last)


def weights(own: Arrays, visits: Steps, chosen: Picked) -> None:
    """Write the weights that are chosen."""
    for scores, places in visits:
        for place in places:
            query = np.arange(place.start, place.stop)
            shift = Shift.of(scores, place, own["lse"][(*scores.heads, place)])
            for tile, visible in scores.tiles(place):
                if chosen.chooses(tile.keys):
                    s, _ = scores.of(tile, visible)
                    chosen.put(query, tile.keys, shift.weights(s))


def weight_sums(
    own: Arrays, rows: RowNumbers, total: np.ndarray, options: dict[str, Any]
) -> None:
    """Add the sums over queries that count, of each key."""
    for scores, place, tile, visible, p in _weights(own, rows, options):
        at = (*scores.heads, place)
        r = np.where(rows.counts[at], rows.factor[at], 0)
        if np.isfinite(r).all():
            sums = (r[..., None, :] @ p)[..., 0, :]
        else:
            terms = r[..., None] * p
            sums = _masked(terms, visible).sum(axis=-2)
        of_heads(total, scores.heads)[..., tile.keys] += sums


def maxima(
    own: Arrays, rows: RowNumbers, total: Maxima, options: dict[str, Any]
) -> None:
    """Take the maxima over queries that count, of each key."""
    for scores, place, tile, visible, p in _weights(own, rows, options):
        at = (*scores.heads, place)
        seen = rows.counts[at][..., None]
        if visible is not None:
            seen = seen & visible
        p *= rows.factor[at][..., None]
        values = np.where(seen, p, -np.inf)
        row = values.argmax(axis=-2)
        value = np.take_along_axis(values, row[..., None, :], -2)[..., 0, :]
        row = np.where(seen.any(axis=-2), row + place.start, -1)
        total.add((*scores.heads, tile.keys), value, row)


def entropy(own: Arrays, result: np.ndarray, options: dict[str, Any]) -> None:
    """Write the entropies of all queries."""
    for scores, places in steps(own["q"], own["k"], **options):
        for place in places:
            at = (*scores.heads, place)
            shift = Shift.of(scores, place, own["lse"][at])
            total = np.zeros(result[at].shape, result.dtype)
            for tile, visible in scores.tiles(place):
                s, _ = scores.of(tile, visible)
                log_p = logarithms(shift, s)
                total -= np.einsum("...k,...k->...", np.exp(log_p), log_p)
            result[at] = total


def gradients(
    own: Arrays,
    visits: Steps,
    factor: Factor,
    rows: RowNumbers,
    found: Arrays,
) -> None:
    """Add the gradients with respect to q and k, unscaled, and to lse.

    And to row_weights: rowsum(P * g). A score_mod adds those of its arrays.
    """
    for scores, places in visits:
        dk, heads = of_heads(found["k"], scores.heads), scores.heads
        for place in places:
            at = (*heads, place)
            counts, r = rows.counts[at], rows.factor[at][..., None]
            if not counts.any():
                continue
            every = bool(counts.all())
            query = np.arange(place.start, place.stop)
            shift = Shift.of(scores, place, own["lse"][at])
            for tile, visible in scores.tiles(place):
                s, cap, slopes = scores.differentiated(tile, visible)
                log_p = logarithms(shift, s)
                p = np.exp(log_p)
                g, seen = factor(heads, query, tile.keys, log_p)
                seen = _both(seen, visible)
                if not every:
                    seen = _both(seen, counts[..., None])
                of_rows = _masked(p * g, seen)
                found["row_weights"][at] += of_rows.sum(axis=-1)
                dx = _masked(np.multiply(r, g) * p, seen)
                found["lse"][at] -= dx.sum(axis=-1)
                if slopes is not None:
                    through = slopes._replace(visible=seen).through(dx)
                    dx = _masked(through, seen)
                if cap is not None:
                    dx *= cap.slope
                found["q"][at] += dx @ scores.k[..., tile.keys, :]
                q = scores.q[..., place, :]
                product = np.swapaxes(dx, -1, -2) @ q
                dk[..., tile.keys, :] += product.sum(axis=2, keepdims=True)


def logarithms(shift: Shift, s: np.ndarray) -> np.ndarray:
    """Return log P, in place: finite where P is 0."""
    log_p = shift.logarithms(s)
    return np.maximum(log_p, LEAST_LOGARITHM, out=log_p)


def _weights(
    own: Arrays, rows: RowNumbers, options: dict[str, Any]
) -> Iterator[tuple[Scores, slice, Tile, np.ndarray | None, np.ndarray]]:
    """The weights of tiles in which some queries count."""
    for scores, places in steps(own["q"], own["k"], **options):
        for place in places:
            at = (*scores.heads, place)
            if not rows.counts[at].any():
                continue
            shift = Shift.of(scores, place, own["lse"][at])
            for tile, visible in scores.tiles(place):
                s, _ = scores.of(tile, visible)
                yield scores, place, tile, visible, shift.weights(s)


def _both(one: Counts, other: Counts) -> Counts:
    """Return the pairs that are in both; None: all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _masked(terms: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Return terms of pairs, 0 at those that do not count; in place."""
    if visible is not None:
        np.copyto(terms, 0, where=~visible)
    return terms
