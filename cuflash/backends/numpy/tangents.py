r"""Tangents of attention on NumPy arrays, in tiles through BLAS.

The equations of `cuflash.reference.jvp` and `double_backward`, in the arrays'
own precision, for inputs that are BOUNDED (`numpy_kinds.Kind`). Arrays are
those of `numpy_tiles`; those of a direction have the same axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.scores import (
    BLOCK_K,
    BLOCK_Q,
    Heads,
    Scores,
    of_heads,
    steps,
    transposed,
)
from cuflash.backends.numpy.tiles import Rows, add_to_keys, shifts
from cuflash.reference.masks import tiles as cut
from cuflash.reference.options import Tile
from cuflash.reference.scores import reduce_to_shape


class Direction(NamedTuple):
    """Tangents of a call's inputs; None where an input does not move."""

    q: np.ndarray | None
    k: np.ndarray | None
    v: np.ndarray | None
    bias: np.ndarray | None
    sink: np.ndarray | None

    def of(self, heads: Heads) -> Direction:
        """Return the tangents of some heads."""
        return Direction(*(of_heads(x, heads) for x in self))


class SecondGradients(NamedTuple):
    """Gradients with respect to backward's inputs."""

    d2q: np.ndarray
    d2k: np.ndarray
    d2v: np.ndarray
    ddout: np.ndarray
    d2bias: np.ndarray | None
    d2sink: np.ndarray | None
    ddlse: np.ndarray


class _Motion:
    """How the scores of some heads move in one direction."""

    def __init__(self, scores: Scores, direction: Direction) -> None:
        self.scores = scores
        self.direction = own = direction.of(scores.heads)
        self.k_transposed = None if own.k is None else transposed(own.k)

    def of(
        self, tile: Tile, slope: np.ndarray | float
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return W and X'; None is 0. Masked pairs have a W too."""
        scores, own = self.scores, self.direction
        x_dot = None
        if own.q is not None:
            keys = scores.k_transposed[..., tile.keys]
            x_dot = own.q[..., tile.queries, :] @ keys
        if self.k_transposed is not None:
            keys = self.k_transposed[..., tile.keys]
            product = scores.q[..., tile.queries, :] @ keys
            x_dot = product if x_dot is None else x_dot + product
        w = None
        if x_dot is not None:
            x_dot *= scores.pairs.scale
            softcap = scores.options.softcap
            w = x_dot if softcap is None else x_dot * slope
        if own.bias is not None:
            bias = tile.of(own.bias)
            w = bias if w is None else w + bias
        return w, x_dot

    def of_sink(self) -> np.ndarray | float:
        """Return the sink's tangent, for all rows; 0 without one."""
        sink = self.direction.sink
        return 0.0 if sink is None else sink[..., None]

    def v_of(self, tile: Tile) -> np.ndarray | None:
        """Return the tangents of a tile's values."""
        v = self.direction.v
        return None if v is None else v[..., tile.keys, :]


class _Sums:
    """b - r and O' of some rows, before they are divided by l.

    r, one number a row, is what W is taken relative to: what all keys share
    cancels before it is multiplied. It is the mean of W, by weight, over the
    first tile in which the row has weights.
    """

    def __init__(self, sink: np.ndarray | float, acc: np.ndarray) -> None:
        """Start with a sink's weight in each row, and O' of 0, zeros."""
        rows = np.zeros_like(acc[..., 0])
        self.sink, self.b, self.r, self.acc = sink + rows, rows, 0 * rows, acc
        self.begun = np.zeros(rows.shape, bool)

    def rescale(self, correction: np.ndarray) -> None:
        self.sink *= correction
        self.b *= correction
        self.acc *= correction[..., None]

    def add(
        self,
        p: np.ndarray,
        kept: np.ndarray,
        w: np.ndarray | None,
        v: np.ndarray,
        v_dot: np.ndarray | None,
    ) -> None:
        """Add P * (W - r) to b, and to O' with the P that is kept."""
        if w is not None:
            if not self.begun.all():
                self._begin(p, w)
            moved = w - self.r[..., None]
            kept_moved = None if kept is p else kept * moved
            moved = moved * p  # w alone may have one number for all keys
            self.b += moved @ np.ones(moved.shape[-1], moved.dtype)
            self.acc += (moved if kept_moved is None else kept_moved) @ v
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

    def finish(self, sink_dot: np.ndarray | float, out: np.ndarray) -> None:
        """Add the sink's term, subtract (b - r) O, and make b - r b."""
        self.b += self.sink * (sink_dot - self.r)
        self.acc -= self.b[..., None] * out
        self.b += self.r


# The forward pass ----------------------------------------------------------


def jvp(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    directions: list[Direction],
    results: tuple[Any, ...],
    *,
    scale: float,
    block_q: int | None = None,
    block_k: int | None = None,
    **options: Any,
) -> None:
    """Write out, lse, and their tangents in each direction.

    results : out and lse, and lists of out_dot and lse_dot.
    """
    block_q, block_k = block_q or BLOCK_Q, block_k or BLOCK_K
    out, lse, out_dot, lse_dot = results
    for heads in steps(q, k, block_q, block_k):
        scores = Scores(q, k, scale, block_k, options, heads)
        motions = [_Motion(scores, x) for x in directions]
        own_v = of_heads(v, heads)
        for start, stop in cut(q.shape[-2], block_q):
            at = (*heads, slice(start, stop))
            m, total, acc, sums = _attend(scores, at[-1], own_v, motions)
            empty = total == 0
            total[empty] = 1
            acc /= total[..., None]
            out[at] = acc
            for own, motion, of_out, of_lse in zip(
                sums, motions, out_dot, lse_dot, strict=True
            ):
                own.rescale(1 / total)
                own.finish(motion.of_sink(), acc)
                of_out[at], of_lse[at] = own.acc, own.b
            m += np.log(total)
            m[empty] = -np.inf
            lse[at] = m


def _attend(
    scores: Scores, rows: slice, v: np.ndarray, motions: list[_Motion]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[_Sums]]:
    """Return m, l, acc and the sums of some queries after all their keys."""
    m, total, acc = scores.start(rows, v.shape[-1], False)
    sums = [_Sums(total, np.zeros_like(acc)) for _ in motions]
    for tile, visible in scores.tiles(rows):
        s, slope = scores.of(tile, visible)
        old, m = m, np.maximum(m, s.max(axis=-1))
        shift = np.where(m == -np.inf, 0, m)
        s -= shift[..., None]
        correction = np.exp(old - shift)
        p = np.exp(s, out=s)
        total *= correction
        total += p @ np.ones(p.shape[-1], p.dtype)
        kept, values = scores.kept(p, tile), v[..., tile.keys, :]
        acc *= correction[..., None]
        acc += kept @ values
        for motion, own in zip(motions, sums, strict=True):
            own.rescale(correction)
            w, _ = motion.of(tile, slope)
            own.add(p, kept, w, values, motion.v_of(tile))
    return m, total, acc, sums


# The gradient of the gradient ------------------------------------------------


def double_backward(
    direction: Direction,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float,
    block_q: int | None = None,
    block_k: int | None = None,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> SecondGradients:
    """Return the gradients; d2bias and d2sink if there are bias and sink."""
    block_q, block_k = block_q or BLOCK_Q, block_k or BLOCK_K
    bias, sink = (options.get(name) for name in ("bias", "sink"))
    delta = np.einsum("...c,...c->...", dout, out)
    if dlse is not None:
        delta -= dlse
    found = SecondGradients(
        d2q=np.zeros(q.shape, q.dtype),
        d2k=np.zeros(k.shape, q.dtype),
        d2v=np.zeros(v.shape, q.dtype),
        ddout=np.zeros(dout.shape, q.dtype),
        d2bias=None if bias is None else np.zeros(bias.shape, q.dtype),
        d2sink=None if sink is None else np.zeros(sink.shape),
        ddlse=np.zeros(lse.shape, q.dtype),
    )
    for heads in steps(q, k, block_q, block_k):
        scores = Scores(q, k, scale, block_k, options, heads)
        motion = _Motion(scores, direction)
        values = _Values(scores, motion, of_heads(v, heads))
        sums = [of_heads(x, heads) for x in found[1:3] + found[4:6]]
        for start, stop in cut(q.shape[-2], block_q):
            at = (*heads, slice(start, stop))
            rows = Rows(at[-1], dout[at], lse[at], delta[at])
            b, ddout = _first_pass(values, rows, out[at])
            found.ddlse[at], found.ddout[at] = b, ddout
            moved = np.einsum("...c,...c->...", rows.dout, ddout)
            _second_pass(values, rows, b, moved, found.d2q[at], sums)
    for x in (found.d2q, found.d2k):
        x *= scale
    return found


class _Values:
    """What both passes need of some heads."""

    def __init__(self, scores: Scores, motion: _Motion, v: np.ndarray) -> None:
        self.scores, self.motion, self.v = scores, motion, v
        self.v_transposed = transposed(v)
        ddv = motion.direction.v
        self.ddv_transposed = None if ddv is None else transposed(ddv)

    def sink_weight(
        self, shift: np.ndarray, rest: np.ndarray | None
    ) -> np.ndarray | float:
        """Return the sink's weight in each row; 0 if it is -inf, or none.

        shift, rest : of `shifts`.
        """
        sink = self.scores.options.sink
        if sink is None:
            return 0.0
        there = sink[..., None] > -np.inf
        s = np.where(there, sink[..., None], 0) - shift[..., 0]
        if rest is not None:
            s -= rest[..., 0]
        return np.where(there, np.exp(s), 0).astype(shift.dtype)


def _first_pass(
    values: _Values, rows: Rows, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return b and ddO of some queries."""
    scores, motion = values.scores, values.motion
    shift, rest = shifts(scores, rows)
    sums = _Sums(values.sink_weight(shift, rest), np.zeros_like(out))
    for tile, visible in scores.tiles(rows.place):
        s, slope = scores.of(tile, visible)
        p = _weights(s, shift, rest)
        w, _ = motion.of(tile, slope)
        kept, v = scores.kept(p, tile), values.v[..., tile.keys, :]
        sums.add(p, kept, w, v, motion.v_of(tile))
    sums.finish(motion.of_sink(), out)
    return sums.b, sums.acc


def _second_pass(
    values: _Values,
    rows: Rows,
    b: np.ndarray,
    moved: np.ndarray,
    d2q: np.ndarray,
    sums: list[np.ndarray | None],
) -> None:
    """Add the terms of some queries to d2q and to the sums, unscaled.

    T is P ((dP - D) (W - b) + U - rowsum(dO * ddO)), which is the reference's
    because E + b D is that sum. What all keys share cancels in W - b and
    dP - D, before it is multiplied.

    moved : rowsum(dO * ddO).
    sums : d2k, d2v, and d2bias and d2sink or None.
    """
    scores, motion = values.scores, values.motion
    d2k, d2v, d2bias, d2sink = sums
    assert d2k is not None and d2v is not None
    own, q = motion.direction, scores.q[..., rows.place, :]
    shift, rest = shifts(scores, rows)
    if d2sink is not None:
        e = moved - b * rows.delta
        e += rows.delta * motion.of_sink()
        part = -(values.sink_weight(shift, rest) * e).sum(axis=-1)
        d2sink += reduce_to_shape(part, d2sink.shape)
    for tile, visible in scores.tiles(rows.place):
        s, tanh = scores.capped(tile)
        slope = 1.0 if tanh is None else 1 - tanh * tanh
        p = _weights(scores.modified(s, tile, visible), shift, rest)
        w, x_dot = motion.of(tile, slope)
        z = scores.factors(tile)
        relative = -b[..., None] if w is None else w - b[..., None]
        kept = p if z is None else z * p
        add_to_keys(d2v, tile, relative * kept, rows.dout)
        ds = rows.dout @ values.v_transposed[..., tile.keys]
        if z is not None:
            ds *= z
        ds -= rows.delta[..., None]
        ds *= p
        t = ds * relative
        if values.ddv_transposed is None:
            t -= p * moved[..., None]
        else:
            u = rows.dout @ values.ddv_transposed[..., tile.keys]
            if z is not None:
                u *= z
            u -= moved[..., None]
            u *= p
            t += u
        if d2bias is not None:
            part = tile.of(d2bias)
            part += reduce_to_shape(t, part.shape)
        if tanh is not None:
            ds *= slope
            t *= slope
            if x_dot is not None:  # g' is -2 t g / cap
                assert scores.options.softcap is not None
                t -= (2 / scores.options.softcap) * tanh * ds * x_dot
        d2q += t @ scores.k[..., tile.keys, :]
        add_to_keys(d2k, tile, t, q)
        if own.k is not None:
            d2q += ds @ own.k[..., tile.keys, :]
        if own.q is not None:
            add_to_keys(d2k, tile, ds, own.q[..., rows.place, :])


def _weights(
    s: np.ndarray, shift: np.ndarray, rest: np.ndarray | None
) -> np.ndarray:
    """Return P = exp(S - lse), in place."""
    s -= shift
    if rest is not None:
        s -= rest
    return np.exp(s, out=s)
