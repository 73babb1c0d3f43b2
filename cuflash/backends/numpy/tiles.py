r"""Attention on NumPy arrays in their own precision, in tiles through BLAS.

.. math::
    m' &= \max(m, \mathrm{rowmax}(S)),\quad P = e^{S - m'} \\
    l' &= l e^{m - m'} + \mathrm{rowsum}(P),\quad
    acc' = acc\, e^{m - m'} + P V

and backward P = exp(S - lse), dS = P (dP - D): the equations of
`cuflash.reference`, for inputs that are BOUNDED or SMALL
(`numpy_kinds.Kind`) and so without what NaN and infinities cost there. Arrays
are (batch, num_heads_kv, group_size, seqlen, d), of float32 or float64; k and
v have a group of 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.scores import (
    BLOCK_K,
    BLOCK_Q,
    Scores,
    of_heads,
    steps,
    transposed,
)
from cuflash.reference.masks import tiles as cut
from cuflash.reference.options import Tile
from cuflash.reference.scores import reduce_to_shape, sink_gradient

# The rounding of an lse up to this changes P by at most |lse| u: 2^-19, and
# 2^-41 in float64. A float32 pays with a second pass over the scores only
# where numbers are large; a float64 has digits to spare.
LARGEST_PLAIN_LSE = {"float32": 32.0, "float64": 2.0**12}


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float,
    block_q: int | None = None,
    block_k: int | None = None,
    small: bool = False,
    **options: Any,
) -> None:
    """Write out and lse; the options are the reference's.

    small : whether the inputs are of `Kind.SMALL`.
    """
    block_q, block_k = block_q or BLOCK_Q, block_k or BLOCK_K
    for heads in steps(q, k, block_q, block_k):
        scores = Scores(q, k, scale, block_k, options, heads)
        for start, stop in cut(q.shape[-2], block_q):
            at = (*heads, slice(start, stop))
            m, total, acc = _attend(scores, at[-1], of_heads(v, heads), small)
            empty = total == 0
            total[empty] = 1
            acc /= total[..., None]
            out[at] = acc
            m += np.log(total)
            m[empty] = -np.inf
            lse[at] = m


def backward(
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
) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv; dbias and dsink if there are bias and sink."""
    block_q, block_k = block_q or BLOCK_Q, block_k or BLOCK_K
    dq, dk, dv = (np.zeros(x.shape, q.dtype) for x in (q, k, v))
    bias, sink = (options.get(name) for name in ("bias", "sink"))
    dbias = None if bias is None else np.zeros(bias.shape, q.dtype)
    delta = np.einsum("...c,...c->...", dout, out)
    if dlse is not None:
        delta -= dlse
    of_sink = delta if sink is None else delta.copy()
    for heads in steps(q, k, block_q, block_k):
        scores = Scores(q, k, scale, block_k, options, heads)
        v_transposed = transposed(of_heads(v, heads))
        sums = _Sums(*(of_heads(x, heads) for x in (dk, dv, dbias)))
        for start, stop in cut(q.shape[-2], block_q):
            at = (*heads, slice(start, stop))
            rows = Rows(at[-1], dout[at], lse[at], delta[at])
            shift, rest = shifts(scores, rows)
            if sink is not None and rest is not None:
                # A flagged row has lse inf, and delta 0.
                ours = np.where(rows.lse == np.inf, 0, rows.lse)[..., None]
                of_sink[at] *= np.exp((ours - shift) - rest)[..., 0]
            _differentiate(
                scores, rows, (shift, rest), v_transposed, dq[at], sums
            )
    dq *= scale
    dk *= scale
    gradients = [dq, dk, dv]
    if dbias is not None:
        gradients.append(dbias)
    if sink is not None:
        gradients.append(sink_gradient(sink, lse, of_sink))
    return tuple(gradients)


def _attend(
    scores: Scores, rows: slice, v: np.ndarray, small: bool
) -> tuple[np.ndarray, ...]:
    """Return m, l and acc of some queries after all their keys.

    With small scores m is 0 in all rows.
    """
    m, total, acc = scores.start(rows, v.shape[-1], small)
    for tile, visible in scores.tiles(rows):
        s, _ = scores.of(tile, visible)
        if not small:
            old, m = m, np.maximum(m, s.max(axis=-1))
            shift = np.where(m == -np.inf, 0, m)
            s -= shift[..., None]
            correction = np.exp(old - shift)
            total *= correction
            acc *= correction[..., None]
        p = np.exp(s, out=s)
        total += p @ np.ones(p.shape[-1], p.dtype)  # a sum by BLAS
        acc += scores.kept(p, tile) @ v[..., tile.keys, :]
    return m, total, acc


class Rows(NamedTuple):
    """What the gradient of some queries needs."""

    place: slice
    dout: np.ndarray
    lse: np.ndarray
    delta: np.ndarray


class _Sums(NamedTuple):
    """Gradients to which all queries add."""

    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None


def _differentiate(
    scores: Scores,
    rows: Rows,
    of_rows: tuple[np.ndarray, np.ndarray | None],
    v_transposed: np.ndarray,
    dq: np.ndarray,
    sums: _Sums,
) -> None:
    """Add the terms of some queries to dq and to the sums, unscaled.

    of_rows : their `shifts`.
    """
    q = scores.q[..., rows.place, :]
    shift, rest = of_rows
    for tile, visible in scores.tiles(rows.place):
        k = scores.k[..., tile.keys, :]
        p, slope = scores.of(tile, visible)
        p -= shift
        if rest is not None:
            p -= rest
        np.exp(p, out=p)
        add_to_keys(sums.dv, tile, scores.kept(p, tile), rows.dout)
        ds = scores.kept(rows.dout @ v_transposed[..., tile.keys], tile)
        ds -= rows.delta[..., None]
        ds *= p
        if sums.dbias is not None:
            part = tile.of(sums.dbias)
            part += reduce_to_shape(ds, part.shape)
        if scores.options.softcap is not None:
            ds *= slope
        add_to_keys(sums.dk, tile, ds, q)
        dq += ds @ k


def shifts(scores: Scores, rows: Rows) -> tuple[np.ndarray, np.ndarray | None]:
    """Return two numbers a row whose sum is lse, or inf where lse is -inf.

    They are m and log(l) where a rounded lse would cost digits of P, if the
    keys reproduce it: the caller's may cover more keys. The second is None if
    it is 0 in all rows.
    """
    lse, most = rows.lse, LARGEST_PLAIN_LSE[rows.lse.dtype.name]
    shift, rest = np.where(lse == -np.inf, np.inf, lse), None
    large = (np.abs(lse) > most) & np.isfinite(lse)
    if large.any():
        m, total, _ = _attend(scores, rows.place, scores.k[..., :0], False)
        log = np.log(total)
        large &= np.abs(m + log - lse) <= 2 * np.spacing(np.abs(lse))
        shift = np.where(large, m, shift)
        rest = np.where(large, log, 0)[..., None]
    return shift[..., None], rest


def add_to_keys(
    total: np.ndarray, tile: Tile, weights: np.ndarray, rows: np.ndarray
) -> None:
    """Add weights^T rows, summed over the heads of a group."""
    product = np.swapaxes(weights, -1, -2) @ rows
    if product.shape[2] > 1:
        product = product.sum(axis=2, keepdims=True)
    part = total[..., tile.keys, :]
    part += product
