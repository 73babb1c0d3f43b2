r"""Attention on NumPy arrays in their own precision, in tiles through BLAS.

.. math::
    m' &= \max(m, \mathrm{rowmax}(S)),\quad P = e^{S - m'} \\
    l' &= l e^{m - m'} + \mathrm{rowsum}(P),\quad
    acc' = acc\, e^{m - m'} + P V

and backward P = exp(S - lse), dS = P (dP - D): the equations of
`cuflash.reference`, of its `jvp` and `double_backward` too, for inputs that
are BOUNDED or SMALL (`kinds.Kind`) and so without what NaN and infinities cost
there. Arrays are (batch, num_heads_kv, group_size, seqlen, d), of float32 or
float64; k and v have a group of 1. Options are those of `arrays.options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.arrays import Arrays, zeros_of_logits
from cuflash.backends.numpy.scores import Scores, of_heads, steps, transposed
from cuflash.backends.numpy.softmax import (
    GradientOfRows,
    Shift,
    Sums,
    add_second_gradient_of_rows,
    attend,
    weight_before_keys,
)
from cuflash.backends.numpy.tangents import Motion
from cuflash.reference.options import Tile
from cuflash.reference.scores import reduce_to_shape


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    directions: Sequence[Arrays],
    results: Sequence[Arrays],
    *,
    small: bool = False,
    **options: Any,
) -> None:
    """Write out and lse, then their tangents in each direction.

    And, if the first result has it, max_score, which is -inf before.

    small : whether the inputs are of `Kind.SMALL`; without directions.
    """
    for scores, tiles in steps(q, k, **options):
        motions = [Motion(scores, x, i) for i, x in enumerate(directions)]
        own_v = of_heads(v, scores.heads)
        for rows in tiles:
            at = (*scores.heads, rows)
            largest = results[0].get("max_score")
            state, sums = attend(
                scores, rows, own_v, motions, small=small,
                largest=None if largest is None else largest[at],
            )  # fmt: skip
            found = [state.finish()]
            for own in sums:
                own.rescale(1 / state.total)
                found.append(own.finish(state.acc))
            for result, (out, lse) in zip(results, found, strict=True):
                result["out"][at], result["lse"][at] = out, lse


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> Arrays:
    """Return the gradients with respect to q, k, v and logits."""
    delta = _delta(dout, out, dlse)
    found = {"q": _zeros(q), "k": _zeros(k), "v": _zeros(v)}
    found |= zeros_of_logits(options)
    of_rows = GradientOfRows(options, lse, delta)
    for scores, tiles in steps(q, k, **options):
        v_transposed = transposed(of_heads(v, scores.heads))
        sums = _of_heads(found, scores)
        for place in tiles:
            at = (*scores.heads, place)
            shift = Shift.of(scores, place, lse[at])
            of_rows.correct(at, shift)
            rows = _Rows(place, dout[at], delta[at], shift)
            _differentiate(scores, rows, v_transposed, found["q"][at], sums)
    for name in ("q", "k"):
        found[name] *= options["scale"]
    return found | of_rows.finish()


def double_backward(
    direction: Arrays,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> Arrays:
    """Return the gradients with respect to `backward`'s inputs."""
    delta = _delta(dout, out, dlse)
    found = {"q": _zeros(q), "k": _zeros(k), "v": _zeros(v)}
    found |= {"dout": _zeros(dout), "dlse": _zeros(lse)}
    found |= zeros_of_logits(options)
    for scores, tiles in steps(q, k, **options):
        values = _Values(Motion(scores, direction), of_heads(v, scores.heads))
        sums = _of_heads(found, scores)
        for place in tiles:
            at = (*scores.heads, place)
            shift = Shift.of(scores, place, lse[at])
            rows = _Rows(place, dout[at], delta[at], shift)
            ddout, b = _first_pass(values, rows, out[at])
            found["dout"][at], found["dlse"][at] = ddout, b
            _second_pass(values, rows, b, ddout, found["q"][at], sums)
    for name in ("q", "k"):
        found[name] *= options["scale"]
    return found


class _Rows(NamedTuple):
    """What the gradients of some queries need."""

    place: slice
    dout: np.ndarray
    delta: np.ndarray
    shift: Shift


class _Values:
    """What both passes of a double backward need of some heads."""

    def __init__(self, motion: Motion, v: np.ndarray) -> None:
        self.scores, self.motion, self.v = motion.scores, motion, v
        self.v_transposed = transposed(v)


def _delta(
    dout: np.ndarray, out: np.ndarray, dlse: np.ndarray | None
) -> np.ndarray:
    """D = rowsum(dO * O) - dlse."""
    delta = np.einsum("...c,...c->...", dout, out)
    if dlse is not None:
        delta -= dlse
    return delta


def _zeros(x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape, x.dtype)


def _of_heads(gradients: Arrays, scores: Scores) -> Arrays:
    """Those of some heads to which all queries add."""
    by_row = ("q", "dout", "dlse")
    return {
        name: of_heads(x, scores.heads)
        for name, x in gradients.items()
        if name not in by_row
    }


def _differentiate(
    scores: Scores,
    rows: _Rows,
    v_transposed: np.ndarray,
    dq: np.ndarray,
    sums: Arrays,
) -> None:
    """Add the terms of some queries to dq and to the sums, unscaled."""
    q = scores.q[..., rows.place, :]
    for tile, visible in scores.tiles(rows.place):
        s, cap, slopes = scores.differentiated(tile, visible)
        p = rows.shift.weights(s)
        _add_to_keys(sums["v"], tile, scores.kept(p, tile), rows.dout)
        ds = scores.kept(rows.dout @ v_transposed[..., tile.keys], tile)
        ds -= rows.delta[..., None]
        ds *= p
        if slopes is not None:
            ds = slopes.through(ds)
        _add_to_pairs(sums, tile, ds)
        if cap is not None:
            ds *= cap.slope
        _add_to_keys(sums["k"], tile, ds, q)
        dq += ds @ scores.k[..., tile.keys, :]


def _first_pass(
    values: _Values, rows: _Rows, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ddO and b of some queries."""
    scores, motion = values.scores, values.motion
    weight = weight_before_keys(scores, rows.shift)
    sums = Sums(motion, weight, np.zeros_like(out))
    for tile, visible in scores.tiles(rows.place):
        s, cap = scores.of(tile, visible)
        p = rows.shift.weights(s)
        v = values.v[..., tile.keys, :]
        sums.add(tile, visible, p, scores.kept(p, tile), v, cap)
    return sums.finish(out)


def _second_pass(
    values: _Values,
    rows: _Rows,
    b: np.ndarray,
    ddout: np.ndarray,
    d2q: np.ndarray,
    sums: Arrays,
) -> None:
    """Add the terms of some queries to d2q and to the sums, unscaled.

    T is P ((dP - D) (W - b) + U - rowsum(dO * ddO)), which is the reference's
    because E + b D is that sum. What all keys share cancels in W - b and
    dP - D, before it is multiplied.
    """
    scores, motion = values.scores, values.motion
    q = scores.q[..., rows.place, :]
    moved = np.einsum("...c,...c->...", rows.dout, ddout)
    e = moved - b * rows.delta
    add_second_gradient_of_rows(sums, motion, rows.shift, rows.delta, e)
    for tile, visible in scores.tiles(rows.place):
        s, cap = scores.of(tile, visible, bends=True)
        p = rows.shift.weights(s)
        w, x_dot = motion.of(tile, cap, visible)
        z = scores.factors(tile)
        relative = -b[..., None] if w is None else w - b[..., None]
        kept = p if z is None else z * p
        _add_to_keys(sums["v"], tile, relative * kept, rows.dout)
        ds = rows.dout @ values.v_transposed[..., tile.keys]
        if z is not None:
            ds *= z
        ds -= rows.delta[..., None]
        ds *= p
        t = ds * relative
        if "v" not in motion.own:
            t -= p * moved[..., None]
        else:
            u = rows.dout @ motion.transposed["v"][..., tile.keys]
            if z is not None:
                u *= z
            u -= moved[..., None]
            u *= p
            t += u
        if scores.expressions is not None and scores.expressions.score:
            x, _ = scores.before_mod(tile)
            w_x, _ = motion.before_mod(tile, cap)
            curved = scores.expressions.curved(x, tile, w_x, visible)
            ds, t = curved.through(ds, t)
        _add_to_pairs(sums, tile, t)
        if cap is not None:
            cap.bend(ds, t, x_dot)
        d2q += t @ scores.k[..., tile.keys, :]
        _add_to_keys(sums["k"], tile, t, q)
        if "k" in motion.own:
            d2q += ds @ motion.own["k"][..., tile.keys, :]
        if "q" in motion.own:
            own_q = motion.own["q"][..., rows.place, :]
            _add_to_keys(sums["k"], tile, ds, own_q)


def _add_to_pairs(sums: Arrays, tile: Tile, ds: np.ndarray) -> None:
    """Add dS, or T, to the gradient of a bias, if there is one."""
    if "bias" in sums:
        part = tile.of(sums["bias"])
        part += reduce_to_shape(ds, part.shape)


def _add_to_keys(
    total: np.ndarray, tile: Tile, weights: np.ndarray, rows: np.ndarray
) -> None:
    """Add weights^T rows, summed over the heads of a group."""
    product = np.swapaxes(weights, -1, -2) @ rows
    if product.shape[2] > 1:
        product = product.sum(axis=2, keepdims=True)
    part = total[..., tile.keys, :]
    part += product
