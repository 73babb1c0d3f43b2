r"""The forward pass and its derivative along a direction.

The inputs move with the velocities Q', K' and V' (B' of a bias, s' of a
sink); the Jacobian-vector product is the velocity of out and lse. Scores move
with W (`tangents`). lse_i is the logarithm of a sum of exponentials, whose
derivative with respect to S_ij is P_ij, and P_ij is exp(S_ij - lse_i):

.. math::
    lse'_i &= \sum_j P_{ij} W_{ij} =: b_i \\
    P' &= P \circ (W - b) \\
    O' &= P' V + P V' = (P \circ W) V + P V' - b\, O.

A sink is a key with the score s, the velocity s' and no value: it adds
P_s s' to b. Dropout multiplies P by Z wherever it meets V or V', and not in
b. None of this needs b before the last key: sums of P W and of
(P * W) V + P V' are rescaled, when the maximum grows, as l and acc are. So
one pass over the keys gives out, lse and their tangents, with memory linear
in seqlen, whether there is one direction or several.

A part of W that all keys of a row share cancels in O', but the roundings of
its products would not. So the sums take W - r, with one number r of the row.
For every r

.. math::
    b - r &= \sum_j P_{ij} (W_{ij} - r) \\
    O' &= (P \circ (W - r)) V + P V' - (b - r)\, O;

r is the mean of W, by weight, over the first tile that gives the row weights.

A product of W's two terms is one of twice the depth, [Q', Q] [K, K']^T. All
in all there are six products of seqlen_q x seqlen_k x head_dim (S, two for W,
P V, (P * W) V, P V') instead of the forward pass's two; n directions take
2 + 4n.

A row that sees no key has out 0, whatever the inputs: its tangents are 0,
that of lse too. Only the mask decides which pairs a sum includes, so a
visible pair of weight 0 whose W is inf or NaN makes its row NaN.

Example
-------
Tangents are limits of differences; two directions at once:

>>> import numpy as np
>>> from cuflash.reference.attention import attention
>>> from cuflash.reference.jvp import jvp
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((n, 4)) for n in (5, 7, 7))
>>> q_dot, k_dot, v_dot = (
...     rng.standard_normal((2, n, 4)) for n in (5, 7, 7)
... )
>>> tiles = {"block_q": 2, "block_k": 3, "causal": True}
>>> out, lse, out_dot, lse_dot = jvp(
...     q, k, v, q_dot, k_dot, v_dot, **tiles
... )
>>> h = 1e-6
>>> for n in range(2):
...     ahead, behind = (
...         attention(
...             q + t * q_dot[n], k + t * k_dot[n], v + t * v_dot[n],
...             causal=True,
...         )
...         for t in (h, -h)
...     )
...     print(
...         np.allclose(out_dot[n], (ahead[0] - behind[0]) / (2 * h)),
...         np.allclose(lse_dot[n], (ahead[1] - behind[1]) / (2 * h)),
...     )
True True
True True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .attention import default_scale
from .masks import masked_product, tiles
from .options import Options, Tile, Tiles
from .scores import quiet
from .softmax import exp_shifted, normalise, shift_of, weighted_sum
from .tangents import Direction
from .tile_state import TileState


class Tangents(NamedTuple):
    """out, lse, and their tangents."""

    out: np.ndarray
    lse: np.ndarray
    out_dot: np.ndarray
    lse_dot: np.ndarray


class TangentState(NamedTuple):
    """The state of rows after some keys, and what their tangents need of it.

    Attributes
    ----------
    keys : TileState
        m, l and acc, as in the forward pass.
    r : ndarray, (..., rows)
        What W is taken relative to; NaN, for 0, before the first weights.
    b : ndarray, (..., rows)
        Sum of exp(score - m) * (W - r).
    acc : ndarray, (..., rows, head_dim_v)
        Sum of exp(score - m) * ((W - r) * value + value').
    """

    keys: TileState
    r: np.ndarray
    b: np.ndarray
    acc: np.ndarray

    @classmethod
    @quiet
    def start(cls, keys: TileState, sink: np.ndarray | None) -> TangentState:
        """Return the state before any key: the sink's, if there is one.

        Parameters
        ----------
        keys : TileState
            `Tiles.start`: l is the sink's weight.
        sink : ndarray, (...), or None
            Its tangent s'.
        """
        r, b = np.full_like(keys.l, np.nan), np.zeros_like(keys.l)
        if sink is not None:
            b = keys.l * sink[..., None]
        return cls(keys, r, b, np.zeros_like(keys.acc))

    @quiet
    def update(
        self,
        pairs: Tiles,
        tile: Tile,
        s: np.ndarray,
        w: np.ndarray,
        v: np.ndarray,
        v_dot: np.ndarray | None,
        visible: np.ndarray | None,
    ) -> TangentState:
        r"""Return the state after one more tile of keys.

        .. math::
            m' &= \max(m, \mathrm{rowmax}(S)),\quad P = e^{S - m'} \\
            b' &= b e^{m - m'} + \mathrm{rowsum}(P \circ (W - r)) \\
            acc' &= acc\, e^{m - m'} + (P \circ (W - r)) V + P V'

        A row that gets its first weights here gets its r, too. Until then b
        and l are those of a sink, and b becomes b - l r.

        Parameters
        ----------
        pairs : Tiles
        tile : Tile
        s, w : ndarray, (..., rows, keys)
            Scores and their tangents.
        v, v_dot : ndarray, (..., keys, head_dim_v)
            The tile's values, and their tangents or None.
        visible : ndarray of bool, broadcastable to s, or None
        """

        def drop(weights: np.ndarray) -> np.ndarray:
            return pairs.dropped(weights, tile)

        keys = self.keys.update(s, v, visible, drop)
        correction = np.exp(self.keys.m - shift_of(keys.m))
        p = exp_shifted(s, keys.m)
        weights = p.sum(axis=-1)
        begins = np.isnan(self.r) & (weights > 0)
        mean = weighted_sum(p, w, visible) / weights
        r = np.where(begins, np.where(np.isfinite(mean), mean, 0), self.r)
        b = self.b - np.where(begins, self.keys.l * r, 0)
        w = w - np.nan_to_num(r)[..., None]
        b = b * correction + weighted_sum(p, w, visible)
        acc = self.acc * correction[..., None]
        acc = acc + masked_product(drop(p) * w, v, visible)
        if v_dot is not None:
            acc = acc + masked_product(drop(p), v_dot, visible)
        return TangentState(keys, r, b, acc)

    @quiet
    def finalize(self) -> Tangents:
        """Divide once: O' = acc / l - (b / l) O and lse' = r + b / l."""
        out, lse = self.keys.finalize()
        b = normalise(self.b[..., None], self.keys.l)[..., 0]
        out_dot = normalise(self.acc, self.keys.l) - b[..., None] * out
        return Tangents(out, lse, out_dot, np.nan_to_num(self.r) + b)


def jvp(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_dot: np.ndarray | None = None,
    k_dot: np.ndarray | None = None,
    v_dot: np.ndarray | None = None,
    *,
    bias_dot: np.ndarray | None = None,
    sink_dot: np.ndarray | None = None,
    mod_dots: Mapping[str, np.ndarray] | None = None,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Tangents:
    """Return out and lse, and their derivatives along a direction.

    A query tile stays; keys stream past it, as in `forward.query_outer`.

    Parameters
    ----------
    q, k, v : array_like
        As in `forward`.
    q_dot, k_dot, v_dot, bias_dot, sink_dot : array_like, optional
        See `tangents.Direction`: None does not move; axes before those of q
        are directions.
    mod_dots : dict of str to array_like, optional
        Tangents of mod_arrays.
    scale : float, optional
    block_q, block_k : int, optional
        Tile sizes; they need not divide the lengths.
    **options
        Fields of `options.Options`.

    Returns
    -------
    Tangents
        out_dot and lse_dot with the axes of directions before those of out
        and lse.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    moves = q_dot, k_dot, v_dot, bias_dot, sink_dot
    direction = Direction(*moves, mods=mod_dots or {})
    together = Options.of(q, options)
    scale = default_scale(q.shape[-1]) if scale is None else scale
    pairs = Tiles(q.shape[-2], k.shape[-2], scale, together)
    rows = (*direction.leading(q), pairs.seqlen_q)
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(q.shape[:-1])
    results = Tangents(
        out, lse, np.zeros((*rows, v.shape[-1])), np.zeros(rows)
    )
    for q_start, q_stop in tiles(pairs.seqlen_q, block_q):
        own = q[..., q_start:q_stop, :]
        keys = pairs.start(own.shape[:-1], v.shape[-1])
        state = TangentState.start(keys, direction.sink)
        for k_start, k_stop in tiles(pairs.seqlen_k, block_k):
            tile = Tile(q_start, q_stop, k_start, k_stop)
            if pairs.skips(tile):
                continue
            at = (..., tile.keys, slice(None))
            scores = pairs.scores(own, k[at], tile)
            s, visible = scores.s, scores.visible
            w, _ = direction.of_scores(pairs, own, k[at], tile, scores)
            moved = None if direction.v is None else direction.v[at]
            state = state.update(pairs, tile, s, w, v[at], moved, visible)
        done = state.finalize()
        for result, part in zip(results[::2], done[::2], strict=True):
            result[..., q_start:q_stop, :] = part
        for result, part in zip(results[1::2], done[1::2], strict=True):
            result[..., q_start:q_stop] = part
    return results
