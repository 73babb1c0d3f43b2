"""The softmax of rows of NumPy arrays: m, l and acc, from tile to tile.

A sink is a logit that each row has before its keys, without a value. All that
it adds stands here: the first m and l, and its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.arrays import Arrays
from cuflash.backends.numpy.scores import Cap, Scores
from cuflash.backends.numpy.tangents import Motion
from cuflash.reference.options import Tile
from cuflash.reference.scores import reduce_to_shape, sink_gradient

# The rounding of an lse up to this changes P by at most |lse| u: 2^-19, and
# 2^-41 in float64. A float32 pays with a second pass over the scores only
# where numbers are large; a float64 has digits to spare.
LARGEST_PLAIN_LSE = {"float32": 32.0, "float64": 2.0**12}


class State(NamedTuple):
    """Some rows after some of their keys; acc is not divided by l yet."""

    m: np.ndarray
    total: np.ndarray
    acc: np.ndarray

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return out and lse, in place; l becomes 1 in rows without keys."""
        m, total, acc = self
        empty = total == 0
        total[empty] = 1
        acc /= total[..., None]
        m += np.log(total)
        m[empty] = -np.inf
        return acc, m


def attend(
    scores: Scores,
    rows: slice,
    v: np.ndarray,
    motions: Sequence[Motion] = (),
    *,
    small: bool = False,
    largest: np.ndarray | None = None,
) -> tuple[State, list[Sums]]:
    """Return the state of some queries after all keys, and sums of tangents.

    small : whether m is 0 in all rows, which have `Kind.SMALL`.
    largest : raised to the largest score of each row, if given.
    """
    m, total, acc = _start(scores, rows, v.shape[-1], small)
    sums = [Sums(x, total, np.zeros_like(acc)) for x in motions]
    for tile, visible in scores.tiles(rows):
        s, cap = scores.of(tile, visible)
        if largest is not None:
            np.maximum(largest, s.max(axis=-1), out=largest)
        if not small:
            old, m = m, np.maximum(m, s.max(axis=-1))
            shift = np.where(m == -np.inf, 0, m)
            s -= shift[..., None]
            correction = np.exp(old - shift)
            total *= correction
            acc *= correction[..., None]
            for own in sums:
                own.rescale(correction)
        p = np.exp(s, out=s)
        total += p @ np.ones(p.shape[-1], p.dtype)  # a sum by BLAS
        kept, values = scores.kept(p, tile), v[..., tile.keys, :]
        acc += kept @ values
        for own in sums:
            own.add(tile, visible, p, kept, values, cap)
    return State(m, total, acc), sums


def _start(
    scores: Scores, rows: slice, head_dim_v: int, small: bool
) -> tuple[np.ndarray, ...]:
    """m, l and acc before any key: the sink's."""
    shape = scores.q[..., rows, 0].shape
    m = np.full(shape, 0 if small else -np.inf, scores.q.dtype)
    total = np.zeros_like(m)
    acc = np.zeros((*shape, head_dim_v), m.dtype)
    if scores.options.sink is not None:
        sink = scores.options.sink[..., None]
        if small:
            total += np.exp(sink)
        else:
            m[...] = sink
            total[...] = sink > -np.inf
    return m, total, acc


class Sums:
    """b - r and O' of some rows, before they are divided by l.

    r, one number a row, is what W is taken relative to: what all keys share
    cancels before it is multiplied. It is the mean of W, by weight, over the
    first tile in which the row has weights.
    """

    def __init__(
        self, motion: Motion, sink: np.ndarray | float, acc: np.ndarray
    ) -> None:
        """Start with a sink's weight in each row, and O' of 0, zeros."""
        rows = np.zeros_like(acc[..., 0])
        self.motion, self.sink = motion, sink + rows
        self.b, self.r, self.acc = rows, 0 * rows, acc
        self.begun = np.zeros(rows.shape, bool)

    def rescale(self, correction: np.ndarray) -> None:
        self.sink *= correction
        self.b *= correction
        self.acc *= correction[..., None]

    def add(
        self,
        tile: Tile,
        visible: np.ndarray | None,
        p: np.ndarray,
        kept: np.ndarray,
        v: np.ndarray,
        cap: Cap | None,
    ) -> None:
        """Add P * (W - r) to b, and to O' with the P that is kept."""
        w, _ = self.motion.of(tile, cap, visible)
        if w is not None:
            if not self.begun.all():
                self._begin(p, w)
            moved = w - self.r[..., None]
            kept_moved = None if kept is p else kept * moved
            moved = moved * p  # w alone may have one number for all keys
            self.b += moved @ np.ones(moved.shape[-1], moved.dtype)
            self.acc += (moved if kept_moved is None else kept_moved) @ v
        v_dot = self.motion.v_of(tile)
        if v_dot is not None:
            self.acc += kept @ v_dot

    def _begin(self, p: np.ndarray, w: np.ndarray) -> None:
        """Set r of the rows that have weights for the first time."""
        ones = np.ones(p.shape[-1], p.dtype)
        weights = p @ ones
        begins = ~self.begun & (weights > 0)
        if (weights[begins] < 1e-10).any():  # else no P W underflows
            p = p / np.where(begins, weights, 1)[..., None]
            weights = p @ ones
        sums = np.einsum("...k,...k->...", p, w)
        np.divide(sums, weights, out=self.r, where=begins)
        self.begun |= begins

    def finish(self, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return O' and b: with the sink's term, and less (b - r) O."""
        self.b += self.sink * (_moves_before_keys(self.motion) - self.r)
        self.acc -= self.b[..., None] * out
        self.b += self.r
        return self.acc, self.b


class Shift(NamedTuple):
    """Two numbers a row whose sum is lse, or inf where lse is -inf.

    They are m and log(l) where a rounded lse would cost digits of P, if the
    keys reproduce it: the caller's may cover more keys. `rest` is None if it
    is 0 in all rows. Both have an axis of keys, of length 1.
    """

    shift: np.ndarray
    rest: np.ndarray | None

    @classmethod
    def of(cls, scores: Scores, rows: slice, lse: np.ndarray) -> Shift:
        """Return those of some queries."""
        most = LARGEST_PLAIN_LSE[lse.dtype.name]
        shift, rest = np.where(lse == -np.inf, np.inf, lse), None
        large = (np.abs(lse) > most) & np.isfinite(lse)
        if large.any():
            (m, total, _), _ = attend(scores, rows, scores.k[..., :0])
            log = np.log(total)
            large &= np.abs(m + log - lse) <= 2 * np.spacing(np.abs(lse))
            shift = np.where(large, m, shift)
            rest = np.where(large, log, 0)[..., None]
        return cls(shift[..., None], rest)

    def weights(self, s: np.ndarray) -> np.ndarray:
        """Return P = exp(S - lse), in place."""
        s = self.logarithms(s)
        return np.exp(s, out=s)

    def logarithms(self, s: np.ndarray) -> np.ndarray:
        """Return log P = S - lse, in place."""
        s -= self.shift
        if self.rest is not None:
            s -= self.rest
        return s


# The gradients of a sink ----------------------------------------------------


class GradientOfRows:
    """Of backward: the sink's gradient, if there is a sink."""

    def __init__(
        self, options: dict[str, Any], lse: np.ndarray, delta: np.ndarray
    ) -> None:
        self.sink, self.lse = options.get("sink"), lse
        self.delta = delta if self.sink is None else delta.copy()

    def correct(self, at: tuple[slice, ...], shift: Shift) -> None:
        """Take what the rounding of lse changes from some rows."""
        if self.sink is not None and shift.rest is not None:
            # A flagged row has lse inf, and delta 0.
            lse = self.lse[at]
            ours = np.where(lse == np.inf, 0, lse)[..., None]
            rounding = np.exp((ours - shift.shift) - shift.rest)
            self.delta[at] *= rounding[..., 0]

    def finish(self) -> Arrays:
        """Return the gradient by its name."""
        if self.sink is None:
            return {}
        return {"sink": sink_gradient(self.sink, self.lse, self.delta)}


def add_second_gradient_of_rows(
    sums: Arrays,
    motion: Motion,
    shift: Shift,
    delta: np.ndarray,
    e: np.ndarray,
) -> None:
    """Add the terms of some queries, -P_s (D dds + E), if there is a sink."""
    if "sink" in sums:
        e += delta * _moves_before_keys(motion)
        part = -(weight_before_keys(motion.scores, shift) * e).sum(axis=-1)
        sums["sink"] += reduce_to_shape(part, sums["sink"].shape)


def weight_before_keys(scores: Scores, shift: Shift) -> np.ndarray | float:
    """Return the sink's weight in each row; 0 if it is -inf, or none."""
    sink = scores.options.sink
    if sink is None:
        return 0.0
    there = sink[..., None] > -np.inf
    s = np.where(there, sink[..., None], 0) - shift.shift[..., 0]
    if shift.rest is not None:
        s -= shift.rest[..., 0]
    return np.where(there, np.exp(s), 0).astype(shift.shift.dtype)


def _moves_before_keys(motion: Motion) -> np.ndarray | float:
    """Return the sink's tangent, for all rows; 0 without one."""
    sink = motion.own.get("sink")
    return 0.0 if sink is None else sink[..., None]
