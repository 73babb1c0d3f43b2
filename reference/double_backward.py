r"""The gradient of the gradient: backward's own backward pass.

`backward` maps (dO, dlse, q, k, v, bias, sink) to gradients dQ, dK, dV, dB
and ds. Let a loss depend on these, with cotangents ddQ, ddK, ddV, ddB and
dds. This module returns its gradients with respect to all of backward's
inputs.

**One direction.** The gradients are those of

.. math:: \varphi = \langle dO, O \rangle + \langle dlse, lse \rangle

with respect to the inputs. So their inner product with the cotangents is the
derivative of phi along the direction u = (ddQ, ddK, ddV, ddB, dds):

.. math::
    L &= \langle ddQ, dQ \rangle + \langle ddK, dK \rangle + \dots
       = \langle dO, O' \rangle + \langle dlse, lse' \rangle \\
      &= \sum_{ij} P_{ij} (W_{ij} dP_{ij} + U_{ij}) - \sum_i b_i D_i

where O', lse' = b and W are `jvp`'s in the direction u, U = dO ddV^T,
dP = dO V^T and D = rowsum(dO * O) - dlse. The gradients of L with respect to
dO and dlse can be read off:

.. math:: ddO = O',\quad ddlse = b.

**One statistic a row.** P depends on S by dP_ij / dS_ik = P_ij
(1[j = k] - P_ik), b by P (W - b) and D by P (dP - rowsum(P * dP)). With
these, and W, U and dP held fixed,

.. math::
    T &= \partial L / \partial S
       = P \circ ((dP - D) \circ W + U - b\, dP - E) \\
    E_i &= dO_i \cdot ddO_i - b_i D_i.

The factors of P in T add up to E by definition, as those in dS add up to D:
sum_j P (W dP + U) = dO . ddO + b rowsum(dO * O).

**One pass shaped like backward.** S is also a function of Q and K, and so is
W = g X' + B', with the slope g and the curvature g' of a softcap (g = 1 and
g' = 0 without). dL/dW = P (dP - D) = dS, so with
X' = scale (ddQ K^T + Q ddK^T)

.. math::
    T_X &= g \circ T + g' \circ dS \circ X' \\
    d2Q &= scale \cdot ((g \circ dS)\, ddK + T_X K) \\
    d2K &= scale \cdot ((g \circ dS)^T ddQ + T_X^T Q) \\
    d2V &= (P \circ (W - b))^T dO \\
    d2B &= T

A score_mod f, after these, has slopes f_x and f_a by the score that comes in
and by its arrays, which move along u, too. With T_B and dS_B in place of T and
dS in all but d2V,

.. math::
    T_B &= f_x T + f_x' dS,\quad dS_B = f_x dS \\
    d2a_n &= \sum (f_a T + f_a' dS)

over all pairs that read element n.

And a sink, a key of score s and velocity dds whose value is 0, has
d2s = -sum_i P_s (D dds + E). Dropout's Z multiplies P in front of V and dO,
and so dP, U, and P (W - b) in d2V; the sums that define D, b and E include it
where O and ddO do.

ddO and b take five products of seqlen_q x seqlen_k x head_dim (S, two for W,
(P * W) V, P ddV), since out and lse are known, and the last pass ten (S, dP,
two for W, U, two each for d2Q and d2K, one for d2V): three times backward's
five. Memory is linear in seqlen. A row that sees no key contributes to
nothing, and its ddO and ddlse are 0.

Example
-------
The Hessian is symmetric: its products with two directions agree.

>>> import numpy as np
>>> from cuflash.reference.attention import attention
>>> from cuflash.reference.double_backward import double_backward
>>> rng = np.random.default_rng(0)
>>> q, k, v, dout = rng.standard_normal((4, 6, 4))
>>> out, lse = attention(q, k, v, causal=True)
>>> a, b = rng.standard_normal((2, 3, 6, 4))  # of q, k and v
>>> given = dout, q, k, v, out, lse
>>> tiles = {"block_q": 2, "block_k": 3, "causal": True}
>>> of_a = double_backward(*a, *given, **tiles)
>>> of_b = double_backward(*b, *given, **tiles)
>>> np.isclose(np.sum(b * of_a[:3]), np.sum(a * of_b[:3]))
np.True_
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .attention import default_scale
from .backward import delta
from .expressions import add_gradients
from .lse_rest import lse_rests
from .masks import masked, masked_product, tiles
from .options import Options, Tile, Tiles
from .scores import quiet, reduce_to_shape, rows_with_rows
from .softmax import score_gradient, weighted_sum
from .tangents import Direction
from .tile_state import probabilities_from_lse


class SecondGradients(NamedTuple):
    """Gradients with respect to backward's inputs, with their shapes.

    d2bias is None without a bias, d2sink without a sink. d2mod has those of
    the arrays of return_dmod, by name; None without any.
    """

    d2q: np.ndarray
    d2k: np.ndarray
    d2v: np.ndarray
    ddout: np.ndarray
    d2bias: np.ndarray | None
    d2sink: np.ndarray | None
    ddlse: np.ndarray
    d2mod: dict[str, np.ndarray] | None = None


def double_backward(
    ddq: np.ndarray | None,
    ddk: np.ndarray | None,
    ddv: np.ndarray | None,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    ddbias: np.ndarray | None = None,
    ddsink: np.ndarray | None = None,
    ddmods: Mapping[str, np.ndarray] | None = None,
    dlse: np.ndarray | None = None,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> SecondGradients:
    """Return the gradients with respect to the inputs of `backward`.

    Parameters
    ----------
    ddq, ddk, ddv, ddbias, ddsink : array_like or None
        Cotangents of dq, dk, dv, dbias and dsink, with their shapes; None
        is 0.
    ddmods : dict of str to array_like, optional
        Those of the gradients of mod_arrays.
    dout, q, k, v, out, lse, scale, block_q, block_k, dlse, **options
        As in `backward.key_outer`.

    Returns
    -------
    SecondGradients
    """
    direction = Direction(ddq, ddk, ddv, ddbias, ddsink, ddmods or {})
    blocks = block_q, block_k
    p = _Pass(dout, q, k, v, out, lse, scale, dlse, direction, blocks, options)
    for q_start, q_stop in tiles(p.seqlen_q, block_q):
        for k_start, k_stop in tiles(p.seqlen_k, block_k):
            tile = p.tile(q_start, q_stop, k_start, k_stop)
            if tile is not None:
                tile.add_ddout()
                tile.add_b()
    p.end_first_pass()
    for k_start, k_stop in tiles(p.seqlen_k, block_k):
        for q_start, q_stop in tiles(p.seqlen_q, block_q):
            tile = p.tile(q_start, q_stop, k_start, k_stop)
            if tile is not None:
                tile.add_d2v()
                tile.add_of_scores()
    return p.gradients()


class _Pass:
    """Operands in float64, statistics of rows, and the gradients."""

    def __init__(
        self,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
        scale: float | None,
        dlse: np.ndarray | None,
        direction: Direction,
        blocks: tuple[int, int],
        options: dict[str, Any],
    ) -> None:
        dout, q, k, v, out, lse = (
            np.asarray(x, np.float64) for x in (dout, q, k, v, out, lse)
        )
        self.dout, self.q, self.k, self.v = dout, q, k, v
        self.out, self.lse, self.direction = out, lse, direction
        self.scale = default_scale(q.shape[-1]) if scale is None else scale
        self.seqlen_q, self.seqlen_k = q.shape[-2], k.shape[-2]
        self.options = Options.of(q, options)
        self.pairs = Tiles(
            self.seqlen_q, self.seqlen_k, self.scale, self.options
        )
        self.rest = lse_rests(lse, q, k, self.pairs, *blocks)
        self.delta = delta(dout, out, dlse)
        self.b, self.e = np.zeros(lse.shape), np.zeros(lse.shape)
        self.ddout = np.zeros(dout.shape)
        self.d2q, self.d2k, self.d2v = (np.zeros(x.shape) for x in (q, k, v))
        self.d2mod = self.options.zeros_of_mod()
        self.d2bias = None
        if self.options.bias is not None:
            self.d2bias = np.zeros(np.shape(self.options.bias))

    def tile(
        self, q_start: int, q_stop: int, k_start: int, k_stop: int
    ) -> _Tile | None:
        """Return the tile's P, dS and W, or None if nothing is visible."""
        tile = Tile(q_start, q_stop, k_start, k_stop)
        return None if self.pairs.skips(tile) else _Tile(self, tile)

    @quiet
    def end_first_pass(self) -> None:
        """Add the sink to b; then ddO -= b O and E = dO . ddO - b D."""
        if self.direction.sink is not None:
            self.b += self.p_sink() * self.direction.sink[..., None]
        self.ddout -= self.b[..., None] * self.out
        self.e = (self.dout * self.ddout).sum(axis=-1) - self.b * self.delta

    @quiet
    def p_sink(self) -> np.ndarray:
        """Return the sink's weight in each row; 0 if it is -inf."""
        sink = np.asarray(self.options.sink, np.float64)[..., None]
        shift = np.where(sink == -np.inf, 0.0, sink)
        weight = np.exp(shift - self.lse) * np.exp(-self.rest)
        return np.where(sink == -np.inf, 0.0, weight)

    @quiet
    def gradients(self) -> SecondGradients:
        """Return all that the passes have added up."""
        d2sink = None
        if self.options.sink is not None:
            moved = self.e
            if self.direction.sink is not None:
                moved = moved + self.delta * self.direction.sink[..., None]
            d2sink = -(self.p_sink() * moved).sum(axis=-1)
            d2sink = reduce_to_shape(d2sink, np.shape(self.options.sink))
        return SecondGradients(
            self.d2q,
            self.d2k,
            self.d2v,
            self.ddout,
            self.d2bias,
            d2sink,
            self.b,
            self.d2mod or None,
        )


class _Tile:
    """P, dS and W of one tile, and the tile's terms of each result."""

    def __init__(self, p: _Pass, tile: Tile) -> None:
        self.whole, self.tile = p, tile
        self.rows = rows = (..., tile.queries, slice(None))
        self.keys = keys = (..., tile.keys, slice(None))
        q, k = p.q[rows], p.k[keys]
        scores = p.pairs.scores(q, k, tile)
        self.scores, self.visible = scores, scores.visible
        lse, rest = p.lse[..., tile.queries], p.rest[..., tile.queries]
        self.p = probabilities_from_lse(scores.s, lse, self.visible, rest)
        self.moving, x_dot = p.direction.moving(p.pairs, q, k, tile, scores)
        self.w = masked(self.moving.w, self.visible)
        self.x_dot = masked(x_dot, self.visible)
        dp = rows_with_rows(p.dout[rows], p.v[keys])
        self.dp = p.pairs.dropped(dp, tile)
        self.ds = score_gradient(
            self.p, self.dp, p.delta[..., tile.queries], self.visible
        )

    def add_b(self) -> None:
        """b_i += rowsum(P * W)."""
        rows = self.whole.b[..., self.tile.queries]
        _add(rows, weighted_sum(self.p, self.w, self.visible))

    @quiet
    def add_ddout(self) -> None:
        """ddO_i += (Z * P * W) V_j + (Z * P) ddV_j."""
        kept = self.whole.pairs.dropped(self.p, self.tile)
        ddout = self.whole.ddout[self.rows]
        _add(ddout, self._times(kept * self.w, self.whole.v[self.keys]))
        ddv = self.whole.direction.v
        if ddv is not None:
            _add(ddout, self._times(kept, ddv[self.keys]))

    @quiet
    def add_d2v(self) -> None:
        """d2V_j += (Z * P * (W - b))^T dO_i."""
        b = self.whole.b[..., self.tile.queries, None]
        kept = self.whole.pairs.dropped(self.p * (self.w - b), self.tile)
        product = self._transposed(kept, self.whole.dout[self.rows])
        _add(self.whole.d2v[self.keys], product)

    @quiet
    def t(self) -> np.ndarray:
        """T = P * ((dP - D) * W + U - b dP - E), 0 where not visible."""
        whole, rows = self.whole, self.tile.queries
        b, e = whole.b[..., rows, None], whole.e[..., rows, None]
        t = self.ds * self.w - self.p * (b * self.dp + e)
        if whole.direction.v is not None:
            ddv = whole.direction.v[self.keys]
            u = rows_with_rows(whole.dout[self.rows], ddv)
            t = t + self.p * whole.pairs.dropped(u, self.tile)
        return masked(t, self.visible)

    @quiet
    def add_of_scores(self) -> None:
        """Add the terms of T and dS to d2Q, d2K and d2B."""
        whole, scale = self.whole, self.whole.scale
        ds, t = self._before_mod(self.ds, self.t())
        if whole.d2bias is not None:
            part = self.tile.of(whole.d2bias)
            _add(part, reduce_to_shape(t, part.shape))
        q, k = whole.q[self.rows], whole.k[self.keys]
        slope, curvature = self.scores.slope_cap, whole.pairs.curvature(q, k)
        t = t * slope
        if curvature is not None:
            t = t + curvature * ds * self.x_dot
        ds = ds * slope
        d2q, d2k = whole.d2q[self.rows], whole.d2k[self.keys]
        _add(d2q, self._times(t, k), scale)
        _add(d2k, self._transposed(t, q), scale)
        ddq, ddk = whole.direction.q, whole.direction.k
        if ddk is not None:
            _add(d2q, self._times(ds, ddk[self.keys]), scale)
        if ddq is not None:
            _add(d2k, self._transposed(ds, ddq[self.rows]), scale)

    def _before_mod(
        self, ds: np.ndarray, t: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return dS_B and T_B, and add to d2a."""
        if self.scores.argument is None:
            return ds, t
        totals, visible = self.whole.d2mod, self.visible
        add_gradients(totals, self.scores.gathers, t, visible)
        add_gradients(totals, self.moving.gathers, ds, visible)
        slope = self.scores.slope_bias
        moved = masked(slope * t + self.moving.slope * ds, visible)
        return masked(slope * ds, visible), moved

    def _times(self, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
        return masked_product(weights, values, self.visible)

    def _transposed(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        visible = self.visible
        if visible is not None:
            visible = np.swapaxes(visible, -1, -2)
        return masked_product(np.swapaxes(weights, -1, -2), rows, visible)


@quiet
def _add(total: np.ndarray, part: np.ndarray, scale: float = 1.0) -> None:
    """total += scale * part, in place; inf - inf gives NaN."""
    total += scale * part
