"""Rows of NumPy calls that are the reference's, and what tiles get instead.

A row is UNBOUNDED (`numpy_kinds`) by its own numbers, those of its head, or
those of a key or pair that it sees. `find` flags these rows and keys. Tiles
then get zeros in their place (`Flagged.rows_of` and so on), which add nothing
to the others' sums, and the reference computes the flagged rows
(`numpy_rows`). So NaN behind a mask costs a copy.

Arrays are those of `numpy_tiles`; flags have their axes but the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.reference.masks import tiles as cut
from cuflash.reference.options import Options, Tile, Tiles

from .numpy_kinds import LARGEST_SCORE, LARGEST_VALUE, kinds, of_bounded
from .numpy_scores import BLOCK_Q, Heads, of_heads, options_of
from .numpy_tangents import Direction

CALL = 10_000  # pairs that the reference computes in a call's own time

_MASKS = ("causal", "window", "segment_ids_q", "segment_ids_k", "mask")


class Values(NamedTuple):
    """The numbers of a part, beside its options.

    of_queries, of_keys : with an axis of tokens; at most `largest`, as are
    of_pairs : tangents of the bias, and
    of_heads : tangents of the sink.
    lse : backward, of the rows.
    """

    q: np.ndarray
    k: np.ndarray
    of_queries: Sequence[np.ndarray]
    of_keys: Sequence[np.ndarray]
    of_pairs: Sequence[np.ndarray]
    of_heads: Sequence[np.ndarray]
    lse: np.ndarray | None
    largest: float

    @classmethod
    def of(
        cls,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        of_queries: Sequence[np.ndarray],
        lse: np.ndarray | None,
        directions: Sequence[Direction],
        largest: float,
    ) -> Values:
        """Return a part's, with those of its directions."""

        def moved(*names: str) -> list[np.ndarray]:
            found = [getattr(x, name) for x in directions for name in names]
            return [x for x in found if x is not None]

        return cls(
            q,
            k,
            [*of_queries, *moved("q")],
            [v, *moved("k", "v")],
            moved("bias"),
            moved("sink"),
            lse,
            largest,
        )

    def kinds(self, scale: float, options: dict[str, Any]) -> np.ndarray:
        """Return the `Kind` of each batch element, (batch,)."""
        values = [*self.of_queries, *self.of_keys]
        values += [*self.of_pairs, *self.of_heads]
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
    """

    rows: np.ndarray
    keys: np.ndarray
    options: dict[str, Any]
    largest: float

    def of(self, heads: Heads) -> Flagged:
        """Return the flags of some heads."""
        rows, keys = (of_heads(x, heads) for x in (self.rows, self.keys))
        options = options_of(self.options, heads)
        return Flagged(rows, keys, options, self.largest)

    def rows_of(self, x: np.ndarray, instead: float = 0) -> np.ndarray:
        """Return q, or what has its axes (with or without the last)."""
        rows = self.rows if x.ndim == 4 else self.rows[..., None]
        return _without(x, rows, instead)

    def keys_of(self, x: np.ndarray) -> np.ndarray:
        """Return k, or what has its axes."""
        return _without(x, self.keys[..., None])

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

    And the rows that see one of the keys. Return also the `Kind` that each
    batch element has without them.
    """
    largest = max(1, abs(scale))
    of_q, of_k = _lengths(values.q), _lengths(values.k)
    keys = np.logical_not(largest * of_k <= LARGEST_SCORE)
    for x in values.of_keys:
        keys |= _beyond(x, values.largest)
    rows = np.logical_not(largest * of_q <= LARGEST_SCORE)
    # By the longest of a batch element, as `kinds` has it.
    longest = _longest(np.where(keys, 0, of_k))
    rows |= ~(abs(scale) * of_q * longest <= LARGEST_SCORE)
    for x in values.of_queries:
        if x.ndim == 4:  # dlse
            x = x[..., None]
        rows |= _beyond(x, values.largest)
    if values.lse is not None:
        rows |= ~(values.lse <= LARGEST_SCORE)
    for within in _heads_within(values, options):
        rows |= ~within[..., None]
    bad_pairs = [~(np.abs(x) <= values.largest) for x in values.of_pairs]
    if "bias" in options:
        bad_pairs.append(~(options["bias"] <= LARGEST_SCORE))
    _flag_readers(rows, keys, bad_pairs, options)
    rows = _in_few_calls(rows, values.k.shape[-2])
    score = abs(scale) * _longest(np.where(rows, 0, of_q)) * longest
    found = of_bounded(score[:, 0, 0, 0], bounded_options(values, options))
    return Flagged(rows, keys, options, values.largest), found


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
    for x in values.of_heads:
        yield np.abs(x) <= values.largest


def _slopes_within(slopes: np.ndarray, lengths: int) -> np.ndarray:
    small: np.ndarray = np.abs(slopes) <= LARGEST_VALUE
    return small & (-slopes * lengths <= LARGEST_SCORE)


def _flag_readers(
    rows: np.ndarray,
    keys: np.ndarray,
    bad_pairs: list[np.ndarray],
    options: dict[str, Any],
) -> None:
    """Flag the rows that see a flagged key or a pair that is not bounded.

    In tiles of queries, whose masks take memory.
    """
    places = np.flatnonzero(keys.any(axis=(0, 1, 2)))
    bad_pairs = [x for x in bad_pairs if x.any()]
    if not places.size and not bad_pairs:
        return
    span = slice(0, keys.shape[-1])
    if not bad_pairs:
        span = slice(int(places[0]), int(places[-1]) + 1)
    # Often all heads have the same: one mask does for them.
    of_all = keys[:, :1]
    columns = of_all if (keys == of_all).all() else keys
    masked = {x: options[x] for x in _MASKS if x in options}
    pairs = Tiles(rows.shape[-1], keys.shape[-1], 1.0, Options(**masked))
    for start, stop in cut(rows.shape[-1], BLOCK_Q):
        tile = Tile(start, stop, span.start, span.stop)
        if pairs.skips(tile):
            continue
        visible = pairs.visible(tile)
        for bad in (columns[..., None, :], *bad_pairs):
            seen = tile.of(bad)
            if visible is not None:
                seen = seen & visible
            rows[..., tile.queries] |= seen.any(axis=-1)


def _in_few_calls(rows: np.ndarray, seqlen_k: int) -> np.ndarray:
    """Flag a batch element's rows in all heads if that takes less time.

    Heads with the same rows share a call of the reference.
    """
    of_any = rows.any(axis=(1, 2), keepdims=True)
    each = rows.sum(axis=(1, 2, 3), keepdims=True) * seqlen_k
    each += (
        rows.any(axis=3, keepdims=True).sum(axis=(1, 2), keepdims=True) * CALL
    )
    heads = rows.shape[1] * rows.shape[2]
    together = of_any.sum(axis=3, keepdims=True) * heads * seqlen_k + CALL
    return rows | (of_any & (together <= each))


def _lengths(x: np.ndarray) -> np.ndarray:
    """The lengths of all vectors."""
    return np.sqrt(np.einsum("...c,...c->...", x, x))


def _longest(lengths: np.ndarray) -> np.ndarray:
    """The largest of each batch element, for all of its vectors."""
    return lengths.max(axis=(1, 2, 3), keepdims=True, initial=0)


def _beyond(x: np.ndarray, largest: float) -> np.ndarray:
    """Which vectors have a number beyond `largest`, or NaN."""
    squares = np.einsum("...c,...c->...", x, x)  # faster than a maximum
    found = np.logical_not(squares <= largest**2)
    found[found] = ~(np.abs(x[found]) <= largest).all(axis=-1)
    return found


def _within(x: np.ndarray, largest: float) -> np.ndarray:
    """Return x with 0 for what is larger than `largest`, or NaN."""
    return _without(x, ~(np.abs(x) <= largest))


def _without(x: np.ndarray, bad: np.ndarray, instead: float = 0) -> np.ndarray:
    """Return x with another number in some places; itself if in none."""
    return np.where(bad, x.dtype.type(instead), x) if bad.any() else x
