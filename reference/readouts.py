r"""Numbers inside the softmax, without the (seqlen_q, seqlen_k) matrices.

With scores x and lse of a forward pass, P_ij = exp(x_ij - lse_i), tile by
tile as backward has it, and of all or some rows, with weights r_i,

.. math::
    c_j &= \sum_i r_i P_{ij} \quad\text{or}\quad \max_i r_i P_{ij} \\
    H_i &= -\sum_j P_{ij} \log P_{ij} = \sum_j P_{ij} (lse_i - x_{ij})

The second form of the entropy takes no logarithm of a weight: where P
underflows its term is 0, the limit. Sums and maxima include visible pairs
alone; a row that sees no key has entropy 0, a key that no row sees a sum and
a maximum of 0. With a sink, which lse includes, rows of P add up to less than
1. Dropout acts on out, not on P.

Gradients take lse as an input of its own: P depends on it by
:math:`\partial P_{ij} / \partial lse_i = -P_{ij}`, on x by the opposite. All
have one form, with a number r_i of the row and g_ij of the pair:

.. math::
    dX_{ij} &= P_{ij}\, r_i g_{ij},\quad dlse_i = -\sum_j dX_{ij} \\
    dQ_i &= scale \sum_j dX_{ij} x'_{ij} K_j,\quad
    dK_j = scale \sum_i dX_{ij} x'_{ij} Q_i

where x' is the slope of a softcap and a score_mod, whose arrays a have the
gradients :math:`\sum_{ij} dX_{ij}\, \partial x_{ij} / \partial a`. g is dW_ij
for weights, dc_j for their sums, and for entropies, with r = dH,
lse_i - x_ij - 1: the derivative of -P log P with respect to x. Of weights only
the chosen pairs count, of a maximum only the pair that has it.

Example
-------
Which keys the queries look at, and how widely each query does:

>>> import numpy as np
>>> from cuflash.reference.attention import attention
>>> from cuflash.reference.readouts import entropy, weight_sums, weights
>>> q, k = 3 * np.eye(4), np.eye(4)
>>> _, lse = attention(q, k, k, scale=1, causal=True)
>>> print(weights(q, k, lse, scale=1, causal=True).round(2))
[[1.   0.   0.   0.  ]
 [0.05 0.95 0.   0.  ]
 [0.05 0.05 0.91 0.  ]
 [0.04 0.04 0.04 0.87]]
>>> print(weight_sums(q, k, lse, scale=1, causal=True).round(2))
[1.14 1.04 0.95 0.87]
>>> print(entropy(q, k, lse, scale=1, causal=True).round(2) + 0.0)
[0.   0.19 0.37 0.53]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .attention import default_scale
from .expressions import add_gradients
from .lse_rest import lse_rests
from .masks import masked, masked_product, tiles
from .options import Options, Scores, Tile, Tiles
from .scores import quiet
from .tile_state import probabilities_from_lse

# g of a tile's pairs, and which of them count (None: all), from the tile and
# log P.
Counts = np.ndarray | None
Factor = Callable[[Tile, np.ndarray], tuple[np.ndarray, Counts]]


class Maxima(NamedTuple):
    """The largest r_i P_ij of each key, and its row; -1 without one."""

    value: np.ndarray
    row: np.ndarray


def weights(
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    *,
    rows: Any = None,
    columns: Any = None,
    scale: float | None = None,
    **options: Any,
) -> np.ndarray:
    """Return P of some queries and keys, a row at a time.

    Parameters
    ----------
    q : array_like, (..., seqlen_q, head_dim)
    k : array_like, (..., seqlen_k, head_dim)
    lse : array_like, (..., seqlen_q)
        Of `attention`.
    rows, columns : sequence of int, optional
        Which of P; negative ones count from the end. All by default.
    scale : float, optional
    **options
        Fields of `options.Options`.

    Returns
    -------
    ndarray of float64, (..., rows, columns)
        0 where a key is not visible.
    """
    p = _Pass(q, k, lse, scale, (1, max(np.shape(k)[-2], 1)), options)
    query, key = _chosen(p, rows, columns)
    found = np.zeros((*p.q.shape[:-2], len(query), len(key)))
    for place, i in enumerate(query.tolist()):
        for tile in p.tiles(i, i + 1):
            found[..., place, :] = tile.p[..., 0, key]
    return found


def weight_sums(
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    *,
    row_weights: np.ndarray | None = None,
    chosen: np.ndarray | None = None,
    reduce: str = "sum",
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> np.ndarray:
    r"""Return :math:`\sum_i r_i P_{ij}`, or the maximum, of chosen rows.

    Parameters
    ----------
    q, k, lse, scale, **options
        As in `weights`.
    row_weights : array_like, broadcastable to (..., seqlen_q), optional
        r; 1 by default.
    chosen : array_like of bool, broadcastable to (..., seqlen_q), optional
        All by default.
    reduce : {"sum", "max"}
    block_q, block_k : int, optional
        Tile sizes; they need not divide the lengths.

    Returns
    -------
    ndarray of float64, (..., seqlen_k)
        0 for a key that no chosen row sees.
    """
    p = _Pass(q, k, lse, scale, (block_q, block_k), options, chosen)
    r = p.of_rows(row_weights)
    if reduce == "max":
        best = _maxima(p, r)
        return np.where(best.row < 0, 0.0, best.value)
    found = np.zeros(p.k.shape[:-1])
    for tile in p.all_tiles():
        terms = tile.p * r[..., tile.place.queries, None]
        found[..., tile.place.keys] += masked(terms, tile.visible).sum(-2)
    return found


def maxima(
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    *,
    row_weights: np.ndarray | None = None,
    chosen: np.ndarray | None = None,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Maxima:
    """Return the largest r_i P_ij of each key, and the row that has it.

    Parameters
    ----------
    q, k, lse, row_weights, chosen, scale, block_q, block_k, **options
        As in `weight_sums`.
    """
    p = _Pass(q, k, lse, scale, (block_q, block_k), options, chosen)
    return _maxima(p, p.of_rows(row_weights))


def entropy(
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> np.ndarray:
    r"""Return :math:`H_i = \sum_j P_{ij} (lse_i - x_{ij})`.

    Parameters
    ----------
    q, k, lse, scale, block_q, block_k, **options
        As in `weight_sums`.

    Returns
    -------
    ndarray of float64, (..., seqlen_q)
        0 for a row that sees no key.
    """
    p = _Pass(q, k, lse, scale, (block_q, block_k), options)
    found = np.zeros(p.lse.shape)
    for tile in p.all_tiles():
        found[..., tile.place.queries] -= (tile.p * tile.log_p).sum(-1)
    return found


# Gradients ------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients with respect to q, k and lse.

    drow_weights, of `weight_sums`, has the axes of lse: rowsum(P * g). dmod:
    of the arrays of return_dmod, by name.
    """

    dq: np.ndarray
    dk: np.ndarray
    dlse: np.ndarray
    drow_weights: np.ndarray
    dmod: dict[str, np.ndarray]


def weights_backward(
    dweights: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    *,
    rows: Any = None,
    columns: Any = None,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Gradients:
    """Return the gradients of `weights`.

    Parameters
    ----------
    dweights : array_like, (..., rows, columns)
    q, k, lse, rows, columns, scale, block_q, block_k, **options
        As in `weights` and `weight_sums`.
    """
    dweights = np.asarray(dweights, np.float64)
    p = _Pass(q, k, lse, scale, (block_q, block_k), options)
    query, key = _chosen(p, rows, columns)

    def factor(tile: Tile, _: np.ndarray) -> tuple[np.ndarray, Counts]:
        lengths = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
        g, counts = (
            np.zeros((*dweights.shape[:-2], *lengths)),
            np.zeros(lengths, bool),
        )
        n, i = np.nonzero(query[:, None] == np.arange(*tile[:2]))
        m, j = np.nonzero(key[:, None] == np.arange(*tile[2:]))
        at: Any = (..., i[:, None], j)
        np.add.at(g, at, dweights[..., n[:, None], m])
        counts[at] = True
        return g, counts

    return _gradients(p, factor, p.of_rows(None))


def weight_sums_backward(
    dsums: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    *,
    row_weights: np.ndarray | None = None,
    chosen: np.ndarray | None = None,
    reduce: str = "sum",
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Gradients:
    """Return the gradients of `weight_sums`.

    Parameters
    ----------
    dsums : array_like, (..., seqlen_k)
    q, k, lse, row_weights, chosen, reduce, scale, block_q, block_k, **options
        As in `weight_sums`.
    """
    dsums = np.asarray(dsums, np.float64)[..., None, :]
    p = _Pass(q, k, lse, scale, (block_q, block_k), options, chosen)
    r = p.of_rows(row_weights)
    row = _maxima(p, r).row[..., None, :] if reduce == "max" else None

    def factor(tile: Tile, _: np.ndarray) -> tuple[np.ndarray, Counts]:
        g = dsums[..., tile.keys]
        if row is None:
            return g, None
        own = np.arange(tile.q_start, tile.q_stop)[:, None]
        return g, row[..., tile.keys] == own

    return _gradients(p, factor, r)


def entropy_backward(
    dentropy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    **options: Any,
) -> Gradients:
    """Return the gradients of `entropy`.

    Parameters
    ----------
    dentropy : array_like, (..., seqlen_q)
    q, k, lse
        As in `weights`.
    **options
        As in `gradients`.
    """
    r = np.asarray(dentropy, np.float64)

    def factor(_: Tile, log_p: np.ndarray) -> tuple[np.ndarray, Counts]:
        return -log_p - 1.0, None

    return gradients(q, k, lse, factor, r, **options)


def gradients(
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    factor: Factor,
    row_factor: np.ndarray | float = 1.0,
    *,
    chosen: np.ndarray | None = None,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Gradients:
    """Return gradients where those of P are r_i g_ij.

    Parameters
    ----------
    q, k, lse, chosen, scale, block_q, block_k, **options
        As in `weight_sums`.
    factor : callable
        (tile, log P) to g and which pairs count, both broadcastable to the
        tile's pairs. log P is 0 where P is 0.
    row_factor : ndarray, broadcastable to (..., seqlen_q)
        r.
    """
    p = _Pass(q, k, lse, scale, (block_q, block_k), options, chosen)
    return _gradients(p, factor, p.of_rows(row_factor))


@quiet
def _gradients(p: _Pass, factor: Factor, r: np.ndarray) -> Gradients:
    dq, dk, dlse, drows = (np.zeros(x.shape) for x in (p.q, p.k, p.lse, p.lse))
    dmod = p.pairs.options.zeros_of_mod()
    found = Gradients(dq, dk, dlse, drows, dmod)
    for tile in p.all_tiles():
        place = tile.place
        rows, keys = (
            (..., x, slice(None)) for x in (place.queries, place.keys)
        )
        g, visible = factor(place, tile.log_p)
        visible = _both(visible, tile.visible)
        of_rows = masked(tile.p * g, visible)
        found.drow_weights[..., place.queries] += of_rows.sum(-1)
        dx = tile.p * (r[..., place.queries, None] * g)
        dx = masked(dx, visible)
        found.dlse[..., place.queries] -= dx.sum(-1)
        add_gradients(found.dmod, tile.scores.gathers, dx, visible)
        dx = masked(dx * tile.scores.slope, visible)
        product = masked_product(dx, p.k[keys], visible)
        found.dq[rows] += p.pairs.scale * product
        seen = None if visible is None else np.swapaxes(visible, -1, -2)
        product = masked_product(np.swapaxes(dx, -1, -2), p.q[rows], seen)
        found.dk[keys] += p.pairs.scale * product
    return found


def _both(one: Counts, other: Counts) -> Counts:
    """Return the pairs that are in both; None: all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


# The pass over tiles --------------------------------------------------------


def _chosen(
    p: _Pass, rows: Any, columns: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The indices of chosen queries and keys."""
    query, key = (
        np.arange(n)[slice(None) if x is None else np.asarray(x, int)]
        for n, x in zip(p.lengths, (rows, columns), strict=True)
    )
    return query, key


class _Tile(NamedTuple):
    """P of a tile, and log P, which is 0 where P is.

    visible : the pairs that count; None: all.
    """

    place: Tile
    scores: Scores
    visible: np.ndarray | None
    p: np.ndarray
    log_p: np.ndarray


class _Pass:
    """Operands in float64, and the tiles in which some pair counts.

    Those do that are visible in rows that are chosen.
    """

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        lse: np.ndarray,
        scale: float | None,
        blocks: tuple[int, int],
        options: dict[str, Any],
        chosen: np.ndarray | None = None,
    ) -> None:
        self.q, self.k, self.lse = (
            np.asarray(x, np.float64) for x in (q, k, lse)
        )
        scale = default_scale(self.q.shape[-1]) if scale is None else scale
        self.lengths = self.q.shape[-2], self.k.shape[-2]
        self.pairs = Tiles(*self.lengths, scale, Options.of(self.q, options))
        self.blocks, self.chosen = blocks, chosen
        self.rest = lse_rests(self.lse, self.q, self.k, self.pairs, *blocks)

    def of_rows(self, factor: Any) -> np.ndarray:
        """Return numbers of the rows; 1 for None."""
        factor = np.asarray(1.0 if factor is None else factor, np.float64)
        return np.broadcast_to(factor, self.lse.shape)

    def all_tiles(self) -> Iterator[_Tile]:
        """The tiles of all queries, in their order."""
        for start, stop in tiles(self.pairs.seqlen_q, self.blocks[0]):
            yield from self.tiles(start, stop)

    def tiles(self, start: int, stop: int) -> Iterator[_Tile]:
        """The tiles of some queries."""
        for k_start, k_stop in tiles(self.pairs.seqlen_k, self.blocks[1]):
            place = Tile(start, stop, k_start, k_stop)
            if not self.pairs.skips(place):
                yield self._tile(place)

    @quiet
    def _tile(self, place: Tile) -> _Tile:
        rows, keys = (
            (..., x, slice(None)) for x in (place.queries, place.keys)
        )
        scores = self.pairs.scores(self.q[rows], self.k[keys], place)
        visible = scores.visible
        if self.chosen is not None:
            own = np.broadcast_to(self.chosen, self.lse.shape)
            visible = _both(visible, own[..., place.queries, None])
        lse, rest = self.lse[..., place.queries], self.rest[..., place.queries]
        p = probabilities_from_lse(scores.s, lse, visible, rest)
        log_p = (scores.s - lse[..., None]) - rest[..., None]
        log_p = np.where(p == 0, 0.0, log_p)
        return _Tile(place, scores, visible, p, log_p)


@quiet
def _maxima(p: _Pass, r: np.ndarray) -> Maxima:
    """Of equal ones the first row counts, and before all numbers NaN."""
    shape = p.k.shape[:-1]
    best = Maxima(np.full(shape, -np.inf), np.full(shape, -1))
    for tile in p.all_tiles():
        rows, keys = tile.place.queries, tile.place.keys
        values = tile.p * r[..., rows, None]
        seen: Any = True
        if tile.visible is not None:
            values = np.where(tile.visible, values, -np.inf)
            seen = tile.visible.any(axis=-2)
        first = values.argmax(axis=-2)[..., None, :]
        value = np.take_along_axis(values, first, -2)[..., 0, :]
        known, last = best.value[..., keys], best.row[..., keys]
        better = (value > known) | (last < 0)
        better |= np.isnan(value) & ~np.isnan(known)
        better &= seen
        row = first[..., 0, :] + rows.start
        best.value[..., keys] = np.where(better, value, known)
        best.row[..., keys] = np.where(better, row, last)
    return best
