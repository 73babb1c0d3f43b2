r"""The forward pass without the (seqlen_q, seqlen_k) matrices.

Four schedules of one computation, all equal to `attention.attention`. In
each, q is (..., seqlen_q, head_dim), k (..., seqlen_k, head_dim) and
v (..., seqlen_k, head_dim_v), with the same leading axes; out is
(..., seqlen_q, head_dim_v) and lse (..., seqlen_q), both float64. Tiles
that see nothing are skipped and tiles that see all need no mask. Sources:
[003], [FA] Dao et al. 2022, arXiv:2205.14135, [FA2] Dao 2023,
arXiv:2307.08691.
"""

from __future__ import annotations

import numpy as np

from . import masks
from .attention import default_scale, scores_of
from .masks import Visibility, masked_product, tiles
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
    causal: bool = False,
) -> Result:
    """Compute one query row at a time, with k and v at hand.

    [003], Algorithm 1. One row of S and P exists at a time.

    Parameters
    ----------
    q, k, v : array_like
    scale : float, optional
    causal : bool, optional

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, scale, out, lse = _prepare(q, k, v, scale)
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    for i in range(seqlen_q):
        visible = masks.visible_tile(
            i, i + 1, 0, seqlen_k, seqlen_q, seqlen_k, causal
        )
        row = slice(i, i + 1)
        s = scores_of(q[..., row, :], k, scale, visible)
        m = row_max(s)
        l = exp_shifted(s, m).sum(axis=-1)  # noqa: E741
        lse[..., row] = logsumexp_of(m, l)
        out[..., row, :] = masked_product(safe_softmax(s), v, visible)
    return out, lse


def query_outer(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> Result:
    """Keep a query tile and its state; stream the keys past them.

    [FA2], Algorithm 1; [003], Algorithm 3. out is divided by l and stored
    once, after the last key tile.

    Parameters
    ----------
    q, k, v : array_like
    scale : float, optional
    causal : bool, optional
    block_q, block_k : int, optional
        Tile sizes; they need not divide the lengths.

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, scale, out, lse = _prepare(q, k, v, scale)
    for q_start, q_stop in tiles(q.shape[-2], block_q):
        k_tiles = tiles(k.shape[-2], block_k)
        state = _stream(q, k, v, scale, causal, q_start, q_stop, k_tiles)
        rows = slice(q_start, q_stop)
        out[..., rows, :], lse[..., rows] = state.finalize()
    return out, lse


def key_outer(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> Result:
    r"""Keep a key tile; out, l and m are reloaded for every query tile.

    .. math::
        m' &= \max(m, \mathrm{rowmax}(S)),\quad P = e^{S - m'} \\
        l' &= l e^{m - m'} + \mathrm{rowsum}(P) \\
        O &\leftarrow (l e^{m - m'} O + P V) / l'

    [FA], Algorithm 1; [003], Algorithm 4. O is divided at every step, so
    that what lies in main memory is always the attention over the keys so
    far.

    Parameters
    ----------
    q, k, v, scale, causal, block_q, block_k
        As in `query_outer`.

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, scale, out, _ = _prepare(q, k, v, scale)
    m_all = np.full(q.shape[:-1], -np.inf)
    l_all = np.zeros(q.shape[:-1])
    for k_start, k_stop in tiles(k.shape[-2], block_k):
        keys = slice(k_start, k_stop)
        for q_start, q_stop in tiles(q.shape[-2], block_q):
            tile = (q_start, q_stop, k_start, k_stop, *_lengths(q, k), causal)
            if masks.tile_visibility(*tile) is Visibility.NONE:
                continue
            visible = masks.tile_mask(*tile)
            rows = slice(q_start, q_stop)
            m_old, l_old = m_all[..., rows], l_all[..., rows]

            s = scores_of(q[..., rows, :], k[..., keys, :], scale, visible)
            m = np.fmax(m_old, row_max(s))
            p = exp_shifted(s, m)
            product = masked_product(p, v[..., keys, :], visible)
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
    causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
    num_splits: int = 4,
) -> Result:
    """Cut the keys in runs of tiles, a state each, merged by a tree.

    The merge is associative (`tile_state`), so runs may be computed apart
    and in any order; this is how few queries fill a large device.

    Parameters
    ----------
    q, k, v, scale, causal, block_q, block_k
        As in `query_outer`.
    num_splits : int, optional
        Number of runs; runs without a tile of their own are empty states.

    Returns
    -------
    out, lse : ndarray
    """
    q, k, v, scale, out, lse = _prepare(q, k, v, scale)
    k_tiles = list(tiles(k.shape[-2], block_k))
    per_split = -(-len(k_tiles) // num_splits)
    for q_start, q_stop in tiles(q.shape[-2], block_q):
        states = []
        for split in range(num_splits):
            run = k_tiles[split * per_split : (split + 1) * per_split]
            states.append(
                _stream(q, k, v, scale, causal, q_start, q_stop, run)
            )
        rows = slice(q_start, q_stop)
        out[..., rows, :], lse[..., rows] = merge_tree(states).finalize()
    return out, lse


def _prepare(q, k, v, scale):
    """Convert to float64, settle the scale, make empty results."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    return q, k, v, scale, out, lse


def _lengths(q, k):
    """Return seqlen_q and seqlen_k."""
    return q.shape[-2], k.shape[-2]


def _stream(q, k, v, scale, causal, q_start, q_stop, k_tiles):
    """Return the state of a query tile after a run of key tiles."""
    q_tile = q[..., q_start:q_stop, :]
    state = TileState.empty(q_tile.shape[:-1], v.shape[-1])
    for k_start, k_stop in k_tiles:
        tile = (q_start, q_stop, k_start, k_stop, *_lengths(q, k), causal)
        if masks.tile_visibility(*tile) is Visibility.NONE:
            continue
        visible = masks.tile_mask(*tile)
        keys = slice(k_start, k_stop)
        s = scores_of(q_tile, k[..., keys, :], scale, visible)
        state = state.update(s, v[..., keys, :], visible)
    return state
