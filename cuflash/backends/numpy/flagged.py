"""Rows of NumPy calls that are the reference's, and what tiles get instead.

A row is UNBOUNDED (`kinds`) by its own numbers, those of its head, or
those of a key or pair that it sees. `find` flags these rows and keys. Tiles
then get zeros in their place (`Flagged.bounded`), which add nothing to the
others' sums, and the reference computes the flagged rows (`rows`). Where all
that NaN does to a row is known (`nan`), the row is not the reference's. So
NaN costs a copy, and its mask if it is seen.

Arrays are those of `tiles`; flags have their axes but the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.arrays import KEYS, LOGITS, OPTIONS, Arrays
from cuflash.backends.numpy.kinds import (
    LARGEST_SCORE,
    LARGEST_VALUE,
    kinds,
    of_bounded,
)
from cuflash.backends.numpy.scores import Heads, of_heads, options_of
from cuflash.backends.numpy.seen import readers, seeing, visible_tiles
from cuflash.reference.options import Tile

CALL = 10_000  # pairs that the reference computes in a call's own time


class Values(NamedTuple):
    """The numbers of a part, beside its options.

    arrays : of which v and, backward, out, dout and dlse are at most
        `largest`, as are
    directions : tangents.
    """

    arrays: Arrays
    directions: Sequence[Arrays]
    largest: float

    def moved(self, *names: str) -> list[np.ndarray]:
        """Return the tangents of some inputs, as far as they move."""
        return [
            x[name] for x in self.directions for name in names if name in x
        ]

    def kinds(self, options: dict[str, Any]) -> np.ndarray:
        """Return the `Kind` of each batch element, (batch,)."""
        values = dict(self.arrays)
        q, k, lse = values.pop("q"), values.pop("k"), values.pop("lse", None)
        all_values = list(values.values())
        for x in self.directions:
            all_values += x.values()
        return kinds(q, k, all_values, options, lse, self.largest)

    @property
    def of_queries(self) -> list[np.ndarray]:
        """Backward: out, dout and dlse."""
        names = "out", "dout", "dlse"
        return [self.arrays[x] for x in names if x in self.arrays]

    @property
    def lengths(self) -> int:
        """seqlen_q + seqlen_k, more than any distance of ALiBi."""
        return sum(self.arrays[x].shape[-2] for x in "qk")


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
        own: dict[str, Any] = {
            name: of_heads(getattr(self, name), heads)
            for name in ("rows", "lost", "nan", "keys", "values")
        }
        return self._replace(**own, options=options_of(self.options, heads))

    def bounded(self, arrays: Arrays) -> Arrays:
        """Return a part's own with 0 for what is flagged; inf for lse."""
        rows, found = self.rows | self.lost, {}
        for name, x in arrays.items():
            if name in OPTIONS:  # its tangent
                found[name] = _without(x, ~(np.abs(x) <= self.largest))
                continue
            flags = self.keys if name in KEYS else rows
            flags = flags if x.ndim == 4 else flags[..., None]
            x = _without(x, flags, np.inf if name == "lse" else 0)
            found[name] = _without(x, np.isnan(x))
        return found

    def tiles(self, keys: slice) -> Iterator[tuple[Tile, np.ndarray | None]]:
        """Return tiles of queries that see some of these keys, and masks."""
        lengths = self.rows.shape[-1], self.keys.shape[-1]
        return visible_tiles(self.options, *lengths, keys)


def find(
    values: Values, options: dict[str, Any]
) -> tuple[Flagged, np.ndarray]:
    """Flag the rows and keys that make batch elements of a part UNBOUNDED.

    And the rows that see one of the keys. A NaN flags none where `nan`
    knows its results: all of it in q, k and v forward; backward that in rows
    whose D is NaN. Return also the `Kind` that each batch element has without
    all these.
    """
    (q, k), scale = (values.arrays[x] for x in "qk"), options["scale"]
    largest, seqlen_k = max(1, abs(scale)), k.shape[-2]
    of_q, nan_q = _lengths(q)
    of_k, nan_k = _lengths(k)
    keys, nan_v = _beyond(values.arrays.get("v", k[..., :0]), values.largest)
    keys |= ~(largest * of_k <= LARGEST_SCORE)
    for x in values.moved("k", "v"):
        keys |= np.logical_or(*_beyond(x, values.largest))
    rows = ~(largest * of_q <= LARGEST_SCORE)
    # By the longest of a batch element, as `kinds` has it.
    longest = _longest(np.where(keys, 0, of_k))
    rows |= ~(abs(scale) * of_q * longest <= LARGEST_SCORE)
    for x in values.moved("q"):
        rows |= np.logical_or(*_beyond(x, values.largest))
    bad_pairs = []
    for bad in _logits_beyond(values, options):
        if bad.ndim == 3:  # of heads
            rows |= bad[..., None]
        else:
            bad_pairs.append(bad)
    lse = values.arrays.get("lse")
    if lse is None:
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
        lost = seeing(nan & ~(lse < np.inf), seqlen_k, options)
        rows |= seeing(nan_q & ~lost, seqlen_k, options)
        rows |= ~(lse <= LARGEST_SCORE)
        rows |= readers(keys | nan_k, bad_pairs, options, rows | lost)
        rows |= readers(nan_v, (), options, rows | nan)
        rows &= ~lost
    if "score_mod" in options:  # which may make a number of NaN
        rows, lost = rows | lost | nan, np.zeros_like(rows)
        nan = lost
    rows = _in_few_calls(rows, seqlen_k)
    of_q = np.where(rows | lost, 0, of_q)
    score = abs(scale) * _longest(of_q) * longest
    found = of_bounded(score[:, 0, 0, 0], bounded_options(values, options))
    flags = rows, lost, nan, keys, nan_v
    return Flagged(*flags, options, values.largest), found


def beyond(
    flagged: Flagged | None,
    lse: np.ndarray,
    seqlen_k: int,
    options: dict[str, Any],
) -> Flagged | None:
    """Flag rows whose lse shows that score_mod has left the bounds, too."""
    rows = ~(lse <= LARGEST_SCORE)
    if not rows.any():
        return flagged
    rows = _in_few_calls(rows, seqlen_k)
    if flagged is not None:
        return flagged._replace(rows=flagged.rows | rows)
    nothing, of_keys = np.zeros_like(rows), np.zeros((1, 1, 1, seqlen_k), bool)
    flags = rows, nothing, nothing, of_keys, of_keys
    return Flagged(*flags, options, LARGEST_VALUE)


def bounded_options(values: Values, options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose logits and slopes flag no row."""
    bounded = dict(options)
    for name in LOGITS:
        if name in options:
            x = options[name]
            bounded[name] = _without(x, ~(x <= LARGEST_SCORE))
    if "alibi_slopes" in options:
        x = options["alibi_slopes"]
        bad = ~_slopes_within(x, values.lengths)
        bounded["alibi_slopes"] = _without(x, bad)
    return bounded


def _logits_beyond(
    values: Values, options: dict[str, Any]
) -> Iterator[np.ndarray]:
    """Which logits, slopes and tangents of logits are not bounded."""
    for name in LOGITS:
        if name in options:
            yield ~(options[name] <= LARGEST_SCORE)
    if "alibi_slopes" in options:
        yield ~_slopes_within(options["alibi_slopes"], values.lengths)
    for x in values.moved(*LOGITS):
        yield ~(np.abs(x) <= values.largest)


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


def _without(x: np.ndarray, bad: np.ndarray, instead: float = 0) -> np.ndarray:
    """Return x with another number in some places; itself if in none."""
    if bad.any():
        x = x.copy(order="K")  # faster than np.where
        np.copyto(x, instead, where=bad)
    return x
