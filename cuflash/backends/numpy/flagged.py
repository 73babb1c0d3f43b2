"""Rows of NumPy calls that are the reference's, and what tiles get instead.

A row is UNBOUNDED (`numpy_kinds`) by its own numbers, those of its head, or
those of a key or pair that it sees. `find` flags these rows and keys. Tiles
then get zeros in their place (`Flagged.rows_of` and so on), which add nothing
to the others' sums, and the reference computes the flagged rows
(`numpy_rows`). Where all that NaN does to a row is known (`numpy_nan`), the
row is not the reference's. So NaN costs a copy, and its mask if it is seen.

Arrays are those of `numpy_tiles`; flags have their axes but the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.kinds import (
    LARGEST_SCORE,
    LARGEST_VALUE,
    kinds,
    of_bounded,
)
from cuflash.backends.numpy.scores import Heads, of_heads, options_of
from cuflash.backends.numpy.seen import readers, seeing, visible_tiles
from cuflash.backends.numpy.tangents import Direction
from cuflash.reference.options import Tile

CALL = 10_000  # pairs that the reference computes in a call's own time


class Values(NamedTuple):
    """The numbers of a part, beside its options.

    of_queries : backward, out, dout and dlse; at most `largest`, as are v and
    directions : tangents.
    lse : backward, of the rows.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    of_queries: Sequence[np.ndarray]
    directions: Sequence[Direction]
    lse: np.ndarray | None
    largest: float

    def moved(self, *names: str) -> list[np.ndarray]:
        """Return the tangents of some inputs, as far as they move."""
        found = [getattr(x, name) for x in self.directions for name in names]
        return [x for x in found if x is not None]

    def kinds(self, scale: float, options: dict[str, Any]) -> np.ndarray:
        """Return the `Kind` of each batch element, (batch,)."""
        values = [self.v, *self.of_queries, *self.moved(*Direction._fields)]
        return kinds(
            *(self.q, self.k, values, scale, options, self.lse, self.largest)
        )

    @property
    def lengths(self) -> int:
        """seqlen_q + seqlen_k, more than any distance of ALiBi."""
        return self.q.shape[-2] + self.k.shape[-2]


class Flagged(NamedTuple):
    """Flags of a part's rows and keys, and its options as the user has them.

    Tiles get `bounded_options`; `largest` is of tangents.

    rows : the reference's.
    lost : rows whose weights are NaN.
    nan : rows whose dS is NaN, as that of lost ones is.
    keys, values : those that tiles get as 0, and those that have a NaN in v.
    """

    rows: np.ndarray
    lost: np.ndarray
    nan: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    options: dict[str, Any]
    largest: float

    def of(self, heads: Heads) -> Flagged:
        """Return the flags of some heads."""
        own = {
            name: of_heads(getattr(self, name), heads)
            for name in ("rows", "lost", "nan", "keys", "values")
        }
        return self._replace(**own, options=options_of(self.options, heads))

    def rows_of(self, x: np.ndarray, instead: float = 0) -> np.ndarray:
        """Return q, or what has its axes (with or without the last)."""
        rows = self.rows | self.lost
        x = _without(x, rows if x.ndim == 4 else rows[..., None], instead)
        return _without(x, np.isnan(x))

    def keys_of(self, x: np.ndarray) -> np.ndarray:
        """Return k, or what has its axes."""
        x = _without(x, self.keys[..., None])
        return _without(x, np.isnan(x))

    def tiles(self, keys: slice) -> Iterator[tuple[Tile, np.ndarray | None]]:
        """Return tiles of queries that see some of these keys, and masks."""
        lengths = self.rows.shape[-1], self.keys.shape[-1]
        return visible_tiles(self.options, *lengths, keys)

    def direction_of(self, x: Direction) -> Direction:
        """Return tangents without what is flagged."""
        q, k, v, bias, sink = x
        return Direction(
            None if q is None else self.rows_of(q),
            None if k is None else self.keys_of(k),
            None if v is None else self.keys_of(v),
            None if bias is None else _within(bias, self.largest),
            None if sink is None else _within(sink, self.largest),
        )


def find(
    values: Values, scale: float, options: dict[str, Any]
) -> tuple[Flagged, np.ndarray]:
    """Flag the rows and keys that make batch elements of a part UNBOUNDED.

    And the rows that see one of the keys. A NaN flags none where `numpy_nan`
    knows its results: all of it in q, k and v forward; backward that in rows
    whose D is NaN. Return also the `Kind` that each batch element has without
    all these.
    """
    largest, seqlen_k = max(1, abs(scale)), values.k.shape[-2]
    of_q, nan_q = _lengths(values.q)
    of_k, nan_k = _lengths(values.k)
    keys, nan_v = _beyond(values.v, values.largest)
    keys |= ~(largest * of_k <= LARGEST_SCORE)
    for x in values.moved("k", "v"):
        keys |= np.logical_or(*_beyond(x, values.largest))
    rows = ~(largest * of_q <= LARGEST_SCORE)
    # By the longest of a batch element, as `kinds` has it.
    longest = _longest(np.where(keys, 0, of_k))
    rows |= ~(abs(scale) * of_q * longest <= LARGEST_SCORE)
    for x in values.moved("q"):
        rows |= np.logical_or(*_beyond(x, values.largest))
    for within in _heads_within(values, options):
        rows |= ~within[..., None]
    bad_pairs = [~(np.abs(x) <= values.largest) for x in values.moved("bias")]
    if "bias" in options:
        bad_pairs.append(~(options["bias"] <= LARGEST_SCORE))
    if values.lse is None:
        rows |= readers(keys, bad_pairs, options, rows)
        lost = readers(nan_k, (), options, rows)
        lost |= seeing(nan_q, seqlen_k, options)
        nan = lost
    else:
        nan = np.zeros_like(rows)
        for x in values.of_queries:
            of_x = _beyond(x[..., None] if x.ndim == 4 else x, values.largest)
            rows |= of_x[0]
            nan |= of_x[1]
        lost = seeing(nan & ~(values.lse < np.inf), seqlen_k, options)
        rows |= seeing(nan_q & ~lost, seqlen_k, options)
        rows |= ~(values.lse <= LARGEST_SCORE)
        rows |= readers(keys | nan_k, bad_pairs, options, rows | lost)
        rows |= readers(nan_v, (), options, rows | nan)
        rows &= ~lost
    rows = _in_few_calls(rows, seqlen_k)
    of_q = np.where(rows | lost, 0, of_q)
    score = abs(scale) * _longest(of_q) * longest
    found = of_bounded(score[:, 0, 0, 0], bounded_options(values, options))
    flags = rows, lost, nan, keys, nan_v
    return Flagged(*flags, options, values.largest), found


def bounded_options(values: Values, options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose bias, sink and slopes flag no row."""
    bounded = dict(options)
    for name in ("bias", "sink"):
        if name in options:
            x = options[name]
            bounded[name] = _without(x, ~(x <= LARGEST_SCORE))
    if "alibi_slopes" in options:
        x = options["alibi_slopes"]
        bad = ~_slopes_within(x, values.lengths)
        bounded["alibi_slopes"] = _without(x, bad)
    return bounded


def _heads_within(
    values: Values, options: dict[str, Any]
) -> Iterator[np.ndarray]:
    """Which heads have a bounded sink, slope, and tangent of the sink."""
    if "sink" in options:
        yield options["sink"] <= LARGEST_SCORE
    if "alibi_slopes" in options:
        yield _slopes_within(options["alibi_slopes"], values.lengths)
    for x in values.moved("sink"):
        yield np.abs(x) <= values.largest


def _slopes_within(slopes: np.ndarray, lengths: int) -> np.ndarray:
    small: np.ndarray = np.abs(slopes) <= LARGEST_VALUE
    return small & (-slopes * lengths <= LARGEST_SCORE)


def _in_few_calls(rows: np.ndarray, seqlen_k: int) -> np.ndarray:
    """Flag a batch element's rows in all heads if that takes less time.

    Heads with the same rows share a call of the reference.
    """
    if not rows.any():
        return rows
    of_any = rows.any(axis=(1, 2), keepdims=True)
    each = rows.sum(axis=(1, 2, 3), keepdims=True) * seqlen_k
    each += (
        rows.any(axis=3, keepdims=True).sum(axis=(1, 2), keepdims=True) * CALL
    )
    heads = rows.shape[1] * rows.shape[2]
    together = of_any.sum(axis=3, keepdims=True) * heads * seqlen_k + CALL
    return rows | (of_any & (together <= each))


def _lengths(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of all vectors without their NaN, and which have some."""
    squares = np.einsum("...c,...c->...", x, x)  # faster than a maximum
    nan = np.isnan(squares)
    if nan.any():
        rest = x[nan]
        rest[np.isnan(rest)] = 0
        squares[nan] = np.einsum("...c,...c->...", rest, rest)
    return np.sqrt(squares), nan


def _longest(lengths: np.ndarray) -> np.ndarray:
    """The largest of each batch element, for all of its vectors."""
    return lengths.max(axis=(1, 2, 3), keepdims=True, initial=0)


def _beyond(x: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Which vectors have a number beyond `largest`, and which have NaN."""
    lengths, nan = _lengths(x)
    found = lengths > largest
    found[found] = (np.abs(x[found]) > largest).any(axis=-1)
    return found, nan


def _within(x: np.ndarray, largest: float) -> np.ndarray:
    """Return x with 0 for what is larger than `largest`, or NaN."""
    return _without(x, ~(np.abs(x) <= largest))


def _without(x: np.ndarray, bad: np.ndarray, instead: float = 0) -> np.ndarray:
    """Return x with another number in some places; itself if in none."""
    if bad.any():
        x = x.copy(order="K")  # faster than np.where
        np.copyto(x, instead, where=bad)
    return x
