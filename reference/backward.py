r"""The backward pass without the (seqlen_q, seqlen_k) matrices.

Four schedules of one computation, all equal to `attention.attention_vjp`.
P is recomputed from lse (and what its rounding took, `lse_rest`), tile by
tile:

.. math::
    P &= e^{S - lse},\quad dP = dO V^T,\quad dS = P \circ (dP - D) \\
    dV_j &\mathrel{+}= P^T dO_i,\quad
    dK_j \mathrel{+}= scale \cdot dS^T Q_i,\quad
    dQ_i \mathrel{+}= scale \cdot dS K_j

([001], "Blockwise equations"). Shapes: dout and out
(..., seqlen_q, head_dim_v), q (..., seqlen_q, head_dim), k
(..., seqlen_k, head_dim), v (..., seqlen_k, head_dim_v), lse
(..., seqlen_q), with the same leading axes; options are the fields of
`options.Options`, such as causal. dq, dk, dv are float64 with the shapes of
q, k, v; dbias follows if there is a bias, dsink if there is a sink, and dmod,
a dict, if return_dmod names arrays (`expressions`). A row that sees no key
contributes to no gradient, even if its q or dout is NaN. A row whose visible
scores are all -inf has lse -inf and P 0 too, but its pairs take part in every
sum, and 0 * inf and 0 * NaN are NaN.

If the loss depends on lse too, its gradient dlse (..., seqlen_q) enters D
alone. With out = P V, dP = dO V^T and lse_i = log sum_j exp(S_ij),

.. math::
    \partial lse_i / \partial S_{ij} &= P_{ij} \\
    dS_{ij} &= P_{ij} (dP_{ij} - rowsum(dO \circ O)_i) + dlse_i P_{ij}
             = P_{ij} (dP_{ij} - D_i) \\
    D_i &= rowsum(dO \circ O)_i - dlse_i

The same holds for a sink, a column of S whose value is 0, and with dropout,
which acts on out and not on lse.
Sources: [001], [003], [FA2] Dao 2023, arXiv:2307.08691, Algorithm 2.

Example
-------
The gradients need no weights from the forward pass, only out and lse:

>>> import numpy as np
>>> from cuflash.reference import backward
>>> from cuflash.reference.attention import attention, attention_vjp
>>> rng = np.random.default_rng(0)
>>> q, k, v, dout = rng.standard_normal((4, 6, 4))
>>> out, lse = attention(q, k, v, causal=True)
>>> dq, dk, dv = backward.key_outer(
...     dout, q, k, v, out, lse, causal=True, block_q=2, block_k=3
... )
>>> expected = attention_vjp(dout, q, k, v, causal=True)
>>> [np.allclose(a, b) for a, b in zip((dq, dk, dv), expected)]
[True, True, True]

D is the row sum of P * dP, though it comes from out:

>>> print(backward.delta(dout, out).round(3))
[ 3.243 -0.011  0.222 -0.496 -0.735  0.018]
>>> p_dp = attention(q, k, np.eye(6), causal=True)[0] * (dout @ v.T)
>>> print(p_dp.sum(axis=1).round(3))
[ 3.243 -0.011  0.222 -0.496 -0.735  0.018]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import default_scale
from .expressions import add_gradients
from .lse_rest import lse_rests
from .masks import masked, masked_product, tiles
from .options import Options, Tile, Tiles
from .scores import reduce_to_shape, rows_with_rows, sink_gradient
from .softmax import score_gradient
from .tile_state import probabilities_from_lse

Gradients = tuple[Any, ...]


def delta(
    dout: np.ndarray, out: np.ndarray, dlse: np.ndarray | None = None
) -> np.ndarray:
    r"""Return :math:`D_i = \sum_c dO_{ic} O_{ic} - dlse_i`.

    [003], eq. 24; [001]. The sum equals rowsum(P * dP), with head_dim_v terms
    per row instead of seqlen_k. The other term makes P (dP - D) the gradient
    of S if the loss depends on lse, whose derivative with respect to S is P.

    Parameters
    ----------
    dout, out : array_like, (..., seqlen_q, head_dim_v)
    dlse : array_like, (..., seqlen_q), optional
        Gradient with respect to lse; 0 by default.

    Returns
    -------
    ndarray of float64, (..., seqlen_q)
    """
    dout, out = np.asarray(dout, np.float64), np.asarray(out, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = (dout * out).sum(axis=-1)
        return rows if dlse is None else rows - np.asarray(dlse, np.float64)


def row_by_row(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> Gradients:
    """Process one query row at a time; k, v, dk and dv are whole.

    [003], Algorithm 5, with P from lse.

    Parameters
    ----------
    dout, q, k, v, out, lse : array_like
    scale : float, optional
    dlse : array_like, (..., seqlen_q), optional
        Gradient with respect to lse; 0 by default.
    **options

    Returns
    -------
    dq, dk, dv, ... : ndarray
    """
    blocks = 1, max(np.shape(k)[-2], 1)
    p = _Pass(dout, q, k, v, out, lse, scale, dlse, blocks, options)
    for i in range(p.seqlen_q):
        tile = p.tile(i, i + 1, 0, p.seqlen_k)
        if tile is not None:
            tile.add_dv()
            tile.add_dq()
            tile.add_dk()
    return p.gradients()


def query_outer(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> Gradients:
    """Keep a query tile and its dq; dk and dv are updated tile by tile.

    [003], Algorithm 6.

    Parameters
    ----------
    dout, q, k, v, out, lse : array_like
    scale : float, optional
    block_q, block_k : int, optional
        Tile sizes; they need not divide the lengths.
    dlse : array_like, (..., seqlen_q), optional
        Gradient with respect to lse; 0 by default.
    **options

    Returns
    -------
    dq, dk, dv, ... : ndarray
    """
    blocks = block_q, block_k
    p = _Pass(dout, q, k, v, out, lse, scale, dlse, blocks, options)
    for q_start, q_stop in tiles(p.seqlen_q, block_q):
        for k_start, k_stop in tiles(p.seqlen_k, block_k):
            tile = p.tile(q_start, q_stop, k_start, k_stop)
            if tile is not None:
                tile.add_dv()
                tile.add_dk()
                tile.add_dq()
    return p.gradients()


def key_outer(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> Gradients:
    """Keep a key tile with its dk and dv; dq is updated tile by tile.

    [003], Algorithm 8; [FA2], Algorithm 2.

    Parameters
    ----------
    dout, q, k, v, out, lse, scale, block_q, block_k, dlse, **options
        As in `query_outer`.

    Returns
    -------
    dq, dk, dv, ... : ndarray
    """
    blocks = block_q, block_k
    p = _Pass(dout, q, k, v, out, lse, scale, dlse, blocks, options)
    for k_start, k_stop in tiles(p.seqlen_k, block_k):
        for q_start, q_stop in tiles(p.seqlen_q, block_q):
            tile = p.tile(q_start, q_stop, k_start, k_stop)
            if tile is not None:
                tile.add_dv()
                tile.add_dk()
                tile.add_dq()
    return p.gradients()


def two_pass(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> Gradients:
    """Compute dk and dv in a loop over key tiles, dq over query tiles.

    [001], "Blockwise backward algorithm". S and P are computed twice; in
    return each gradient tile is completed in one loop and stored once.

    Parameters
    ----------
    dout, q, k, v, out, lse, scale, block_q, block_k, dlse, **options
        As in `query_outer`.

    Returns
    -------
    dq, dk, dv, ... : ndarray
    """
    blocks = block_q, block_k
    p = _Pass(dout, q, k, v, out, lse, scale, dlse, blocks, options)
    for k_start, k_stop in tiles(p.seqlen_k, block_k):
        for q_start, q_stop in tiles(p.seqlen_q, block_q):
            tile = p.tile(q_start, q_stop, k_start, k_stop)
            if tile is not None:
                tile.add_dv()
                tile.add_dk()
    for q_start, q_stop in tiles(p.seqlen_q, block_q):
        for k_start, k_stop in tiles(p.seqlen_k, block_k):
            tile = p.tile(q_start, q_stop, k_start, k_stop)
            if tile is not None:
                tile.add_dq()
    return p.gradients()


class _Pass:
    """Operands in float64, D, and the gradients, initially zero."""

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
        blocks: tuple[int, int],
        options: dict[str, Any],
    ) -> None:
        dout, q, k, v, lse = (
            np.asarray(x, np.float64) for x in (dout, q, k, v, lse)
        )
        self.dout, self.q, self.k, self.v, self.lse = dout, q, k, v, lse
        self.scale = default_scale(q.shape[-1]) if scale is None else scale
        self.seqlen_q, self.seqlen_k = q.shape[-2], k.shape[-2]
        self.options = Options.of(q, options)
        self.pairs = Tiles(
            self.seqlen_q, self.seqlen_k, self.scale, self.options
        )
        self.rest = lse_rests(lse, q, k, self.pairs, *blocks)
        self.delta = delta(dout, out, dlse)
        self.dq, self.dk, self.dv = (np.zeros(x.shape) for x in (q, k, v))
        self.dbias = None
        if self.options.bias is not None:
            self.dbias = np.zeros(np.shape(self.options.bias))
        self.dmod = self.options.zeros_of_mod()

    def tile(
        self, q_start: int, q_stop: int, k_start: int, k_stop: int
    ) -> _Tile | None:
        """Return the tile's P and dS, or None if nothing is visible."""
        tile = Tile(q_start, q_stop, k_start, k_stop)
        return None if self.pairs.skips(tile) else _Tile(self, tile)

    def gradients(self) -> Gradients:
        """Return dq, dk, dv, and dbias, dsink and dmod if they exist."""
        gradients: list[Any] = [self.dq, self.dk, self.dv]
        if self.dbias is not None:
            gradients.append(self.dbias)
        if self.options.sink is not None:
            sink = self.options.sink
            moved = self.delta * np.exp(-self.rest)
            gradients.append(sink_gradient(sink, self.lse, moved))
        if self.dmod:
            gradients.append(self.dmod)
        return tuple(gradients)


class _Tile:
    """P and dS of one tile, and the tile's terms of each gradient."""

    def __init__(self, p: _Pass, tile: Tile) -> None:
        self.whole, self.tile = p, tile
        self.rows = rows = (..., tile.queries, slice(None))
        self.keys = keys = (..., tile.keys, slice(None))

        self.scores = p.pairs.scores(p.q[rows], p.k[keys], tile)
        s, self.visible = self.scores.s, self.scores.visible
        visible = self.visible
        lse, rest = p.lse[..., tile.queries], p.rest[..., tile.queries]
        weights = probabilities_from_lse(s, lse, visible, rest)
        self.p = p.pairs.dropped(weights, tile)
        dp = p.pairs.dropped(rows_with_rows(p.dout[rows], p.v[keys]), tile)
        delta_rows = p.delta[..., tile.queries]
        self.ds_softmax = score_gradient(weights, dp, delta_rows, visible)
        self.ds = self._through(self.scores.slope)

    def add_dv(self) -> None:
        """dV_j += P^T dO_i."""
        product = self._transposed(self.p, self.whole.dout[self.rows])
        _add(self.whole.dv[self.keys], product)

    def add_dk(self) -> None:
        """dK_j += scale * dS^T Q_i."""
        product = self._transposed(self.ds, self.whole.q[self.rows])
        _add(self.whole.dk[self.keys], product, self.whole.scale)

    def add_dq(self) -> None:
        """dQ_i += scale * dS K_j; adds to dbias and dmod, too."""
        keys = self.whole.k[self.keys]
        product = masked_product(self.ds, keys, self.visible)
        _add(self.whole.dq[self.rows], product, self.whole.scale)
        if self.whole.dbias is not None:
            part = self.tile.of(self.whole.dbias)
            ds_bias = self._through(self.scores.slope_bias)
            _add(part, reduce_to_shape(ds_bias, part.shape))
        gathers = self.scores.gathers
        add_gradients(self.whole.dmod, gathers, self.ds_softmax, self.visible)

    def _through(self, slope: np.ndarray | float) -> np.ndarray:
        """Return dS times a slope, 0 where not visible."""
        with np.errstate(invalid="ignore"):
            return masked(self.ds_softmax * slope, self.visible)

    def _transposed(
        self, weights: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        visible = self.visible
        if visible is not None:
            visible = np.swapaxes(visible, -1, -2)
        return masked_product(np.swapaxes(weights, -1, -2), values, visible)


def _add(
    gradient: np.ndarray, product: np.ndarray, scale: float = 1.0
) -> None:
    """gradient += scale * product, in place; inf - inf gives NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        gradient += scale * product
