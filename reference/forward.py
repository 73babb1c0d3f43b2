r"""The forward pass without the (seqlen_q, seqlen_k) matrices.

Four schedules of one computation, all equal to `attention.attention`. In
each, q is (..., seqlen_q, head_dim), k (..., seqlen_k, head_dim) and
v (..., seqlen_k, head_dim_v), with the same leading axes; out is
(..., seqlen_q, head_dim_v) and lse (..., seqlen_q), both float64; options
are the fields of `options.Options`, such as causal. Tiles without a visible
pair are skipped; fully visible tiles need no mask. `without_softmax` is the
loop that they are built on. Sources: [003], [FA] Dao et al. 2022,
arXiv:2205.14135, [FA2] Dao 2023, arXiv:2307.08691.

Example
-------
Five queries and seven keys in tiles of 2 x 3: three orders of the same
tiles, one result.

>>> import numpy as np
>>> from cuflash.reference import forward
>>> from cuflash.reference.attention import attention
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((n, 4)) for n in (5, 7, 7))
>>> expected, _ = attention(q, k, v, causal=True)
>>> tiles = {"block_q": 2, "block_k": 3, "causal": True}
>>> for schedule in (
...     forward.query_outer, forward.key_outer, forward.split_keys
... ):
...     out, lse = schedule(q, k, v, **tiles)
...     print(schedule.__name__, np.allclose(out, expected, rtol=1e-14))
query_outer True
key_outer True
split_keys True

Without softmax the tiles are terms of a sum, and the product associates:

>>> plain = forward.without_softmax(q, k, v, scale=1, block_q=2, block_k=3)
>>> print(np.allclose(plain, q @ (k.T @ v)))
True
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from .attention import default_scale
from .masks import masked_product, tile_slices, tiles
from .options import Options, Tile, Tiles
from .scores import scores_of, with_sink
from .softmax import (
    exp_shifted,
    normalise,
    row_max,
    safe_softmax,
    shift_of,
)
from .tile_state import TileState, logsumexp_of, merge_tree

Result = tuple[np.ndarray, np.ndarray]


def row_by_row(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    **options: Any,
) -> Result:
    """Compute one query row at a time; k and v are whole.

    [003], Algorithm 1. One row of S and P exists at a time.

    Parameters
    ----------
    q, k, v : array_like
    scale : float, optional
    **options

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, out, lse, pairs = _prepare(q, k, v, scale, options)
    sink = pairs.options.sink
    for i in range(pairs.seqlen_q):
        row = slice(i, i + 1)
        tile = Tile(i, i + 1, 0, pairs.seqlen_k)
        s, _, visible, *_ = pairs.scores(q[..., row, :], k, tile)
        s = with_sink(s, sink)
        m = row_max(s)
        l = exp_shifted(s, m).sum(axis=-1)  # noqa: E741
        lse[..., row] = logsumexp_of(m, l)
        p = safe_softmax(s)[..., : pairs.seqlen_k]
        kept = pairs.dropped(p, tile)
        out[..., row, :] = masked_product(kept, v, visible)
    return out, lse


def query_outer(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Result:
    """Keep a query tile and its state; stream the keys past them.

    [FA2], Algorithm 1; [003], Algorithm 3. out is divided by l and stored
    once, after the last key tile.

    Parameters
    ----------
    q, k, v : array_like
    scale : float, optional
    block_q, block_k : int, optional
        Tile sizes; they need not divide the lengths.
    **options

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, out, lse, pairs = _prepare(q, k, v, scale, options)
    for q_start, q_stop in tiles(pairs.seqlen_q, block_q):
        rows = slice(q_start, q_stop)
        state = state_of_rows(q, k, v, pairs, rows, block_k)
        out[..., rows, :], lse[..., rows] = state.finalize()
    return out, lse


def state_of_rows(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pairs: Tiles,
    rows: slice,
    block_k: int,
) -> TileState:
    """Return the state of a query tile after all its keys, and the sink.

    Parameters
    ----------
    q, k, v : ndarray of float64
    pairs : Tiles
    rows : slice
        Of the queries.
    block_k : int
    """
    start = pairs.start(q[..., rows, 0].shape, v.shape[-1])
    k_tiles = tiles(pairs.seqlen_k, block_k)
    return _stream(q, k, v, pairs, rows, k_tiles, start)


def key_outer(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> Result:
    r"""Keep a key tile; out, l and m are reloaded for every query tile.

    .. math::
        m' &= \max(m, \mathrm{rowmax}(S)),\quad P = e^{S - m'} \\
        l' &= l e^{m - m'} + \mathrm{rowsum}(P) \\
        O &\leftarrow (l e^{m - m'} O + P V) / l'

    [FA], Algorithm 1; [003], Algorithm 4. O is divided by l in every
    iteration, so that main memory always holds the attention over the keys
    so far.

    Parameters
    ----------
    q, k, v, scale, block_q, block_k, **options
        As in `query_outer`.

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, out, _, pairs = _prepare(q, k, v, scale, options)
    start = pairs.start(q.shape[:-1], 0)
    m_all, l_all = start.m.copy(), start.l.copy()
    for k_start, k_stop in tiles(pairs.seqlen_k, block_k):
        keys = slice(k_start, k_stop)
        for q_start, q_stop in tiles(pairs.seqlen_q, block_q):
            tile = Tile(q_start, q_stop, k_start, k_stop)
            if pairs.skips(tile):
                continue
            rows = slice(q_start, q_stop)
            m_old, l_old = m_all[..., rows], l_all[..., rows]

            s, _, visible, *_ = pairs.scores(
                q[..., rows, :], k[..., keys, :], tile
            )
            m = np.fmax(m_old, row_max(s))
            p = exp_shifted(s, m)
            kept = pairs.dropped(p, tile)
            product = masked_product(kept, v[..., keys, :], visible)
            with np.errstate(over="ignore", invalid="ignore"):
                l_kept = l_old * np.exp(m_old - shift_of(m))
                l = l_kept + p.sum(axis=-1)  # noqa: E741
                o = l_kept[..., None] * out[..., rows, :] + product
                out[..., rows, :] = normalise(o, l)
            m_all[..., rows], l_all[..., rows] = m, l
    return out, logsumexp_of(m_all, l_all)


def split_keys(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    num_splits: int = 4,
    **options: Any,
) -> Result:
    """Split the keys into runs of tiles; merge the runs' states in a tree.

    The merge is associative (`tile_state`), so runs may be computed
    independently and in any order. This lets few queries fill a large
    device.

    Parameters
    ----------
    q, k, v, scale, block_q, block_k, **options
        As in `query_outer`.
    num_splits : int, optional
        Number of runs; a run without tiles is an empty state.

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, out, lse, pairs = _prepare(q, k, v, scale, options)
    k_tiles = list(tiles(pairs.seqlen_k, block_k))
    per_split = -(-len(k_tiles) // num_splits)
    for q_start, q_stop in tiles(pairs.seqlen_q, block_q):
        rows = slice(q_start, q_stop)
        shape = q[..., rows, 0].shape
        nothing = TileState.empty(shape, v.shape[-1])
        states = [pairs.start(shape, v.shape[-1])]  # the sink is one part
        for split in range(num_splits):
            run = k_tiles[split * per_split : (split + 1) * per_split]
            states.append(_stream(q, k, v, pairs, rows, run, nothing))
        out[..., rows, :], lse[..., rows] = merge_tree(states).finalize()
    return out, lse


def max_score(
    q: np.ndarray,
    k: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> np.ndarray:
    r"""Return the largest score of each row, tile by tile.

    .. math:: m_i = \max_{j\ \mathrm{visible}} x_{ij}

    x are the scores that the softmax is taken of, after scale and options. A
    sink is no key and does not count. As in lse, a score of inf counts more
    than one of NaN: a row is inf if it has the one, NaN if only the other.

    Parameters
    ----------
    q, k, scale, block_q, block_k, **options
        As in `query_outer`.

    Returns
    -------
    ndarray, (..., seqlen_q)
        -inf for a row without a visible key.
    """
    q, k, _, _, m, pairs = _prepare(
        q, k, np.asarray(k)[..., :0], scale, options
    )
    has_nan = np.zeros(m.shape, bool)
    for rows in tile_slices(pairs.seqlen_q, block_q):
        for keys in tile_slices(pairs.seqlen_k, block_k):
            tile = Tile(rows.start, rows.stop, keys.start, keys.stop)
            if pairs.skips(tile):
                continue
            s, *_ = pairs.scores(q[..., rows, :], k[..., keys, :], tile)
            m[..., rows] = np.fmax(m[..., rows], row_max(s))
            has_nan[..., rows] |= np.isnan(s).any(axis=-1)
    return np.where(has_nan & (m < np.inf), np.nan, m)


def without_softmax(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
    heads_first: bool = False,
) -> np.ndarray:
    r"""Compute S V, tile by tile: what attention would be without softmax.

    .. math:: O_i \mathrel{+}= scale \cdot (Q_i K_j^T) V_j

    [003], Algorithm 2, eq. 42, where the scale is 1. A sum over key tiles
    needs no row of S whole, and no state but O itself; `query_outer` makes
    the softmax such a sum. Without softmax the product may even be taken as
    Q (K^T V), which needs no S at all.

    Parameters
    ----------
    q, k, v, scale, block_q, block_k
        As in `query_outer`.
    heads_first : bool, optional
        As in `options.Options`.

    Returns
    -------
    ndarray, (..., seqlen_q, head_dim_v)
    """
    q, k, v, out, _, pairs = _prepare(
        q, k, v, scale, {"heads_first": heads_first}
    )
    for rows in tile_slices(pairs.seqlen_q, block_q):
        for keys in tile_slices(pairs.seqlen_k, block_k):
            s = scores_of(q[..., rows, :], k[..., keys, :], pairs.scale)
            out[..., rows, :] += s @ v[..., keys, :]
    return out


def _prepare(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float | None,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, Tiles]:
    """Convert to float64, allocate the results, collect the options."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    together = Options.of(q, options)
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    pairs = Tiles(q.shape[-2], k.shape[-2], scale, together)
    return q, k, v, out, lse, pairs


def _stream(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pairs: Tiles,
    rows: slice,
    k_tiles: Iterable[tuple[int, int]],
    state: TileState,
) -> TileState:
    """Return the state of a query tile after a run of key tiles."""
    for k_start, k_stop in k_tiles:
        tile = Tile(rows.start, rows.stop, k_start, k_stop)
        if pairs.skips(tile):
            continue
        keys = slice(k_start, k_stop)
        own = q[..., rows, :], k[..., keys, :]
        s, _, visible, *_ = pairs.scores(*own, tile)
        drop = functools.partial(pairs.dropped, tile=tile)
        state = state.update(s, v[..., keys, :], visible, drop)
    return state
