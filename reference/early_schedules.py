r"""Schedules on the way to FlashAttention, and what each costs.

The sources reach the schedules of `traffic` by way of others, which are right
but move more, or are the links between two of them. They run on the same
counted memory. Leading terms, in elements, with T x d matrices, M elements of
fast memory, n = T / B tiles::

    forward row blocks      2 T^3 d / M            [003], eq. 39
    backward row blocks     12 T^3 d / M           [003], eq. 70
    forward output slots    3 n T d - s (2 n - 1) B d  [000], s slots
    backward draft          5 n T d                [003], Algorithm 7
    backward without D      8 n T d                [000], "The D_i trick"

These counts differ from the sources as follows:

- [003] calls eq. 45, T^2 d^2 / M, smaller than eq. 39. With the tiles of
  eq. 44 it is 8 T^2 d^2 / M, smaller than 2 T^3 d / M from T = 4 d on.
- [003] gives both row-block schedules the same order. The constants differ:
  backward has half as many rows in a block and moves 6 matrices for each
  block, forward 2.
- [000] says that with all outputs in fast memory the outer-product schedule
  is the inner-product one. That holds for O; Q is still loaded for every key
  tile, and K and V are loaded once.
- [003] drops the draft of Algorithm 7 because it loads O for every key tile.
  With one or two key tiles the draft moves less: it loads dO once less and
  has no delta in slow memory.
- [000] loads K twice and V once without D, keeping a row of P and dP, and
  concludes that D halves the loads of both and so doubles the intensity.
  Tile by tile, as here, both are loaded twice without D. But dK and dV move
  as often either way, so that D saves 8 n T d - 6 n T d, a quarter.

Sources: [000], "Inner product vs. outer product in attention" and "The D_i
trick"; [003], "Situation when storing T x d matrices is not possible" and
Algorithm 7.

Example
-------
16 tokens, head_dim 4, tiles of 4: each output slot saves n - 1 = 3 loads and
stores of a tile of O, and its first load, of zeros.

>>> import numpy as np
>>> from cuflash.reference import traffic, early_schedules
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 16, 4))
>>> for slots in (0, 1, 4):
...     slow = early_schedules.forward_output_slots(
...         q, k, v, block_q=4, block_k=4, slots=slots
...     )
...     print(slots, traffic.counts_of(slow)["out"])
0 Count(loads=256, stores=256)
1 Count(loads=192, stores=208)
4 Count(loads=0, stores=64)
"""

from __future__ import annotations

import numpy as np

from .attention import default_scale, scores_of
from .backward import delta as delta_of
from .masks import tile_slices
from .softmax import safe_softmax, score_gradient, weighted_sum
from .tile_state import TileState, probabilities_from_lse
from .traffic import (
    ALL,
    Count,
    Counts,
    Memories,
    Sizes,
    memories_of,
    tile_weights,
)

# Shapes as in `traffic`.
#
# --------------------------------------------------------------------- forward


def forward_row_blocks(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
) -> Memories:
    """Compute block_q rows of S together; they stay in fast memory whole.

    [003], eq. 36 to 39. Without the online softmax a row of S must be
    complete before its weights are. `roofline.forward_rows` says how many
    rows fit.

    Returns
    -------
    dict of str to Memory
        q, k, v, out.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out = np.zeros((len(q), v.shape[-1]))
    slow = memories_of(q=q, k=k, v=v, out=out)
    for rows in tile_slices(len(q), block_q):
        s = scores_of(slow["q"].load(rows), slow["k"].load(), scale)
        p = safe_softmax(s)
        slow["out"].store(rows, p @ slow["v"].load())
    return slow


def forward_row_blocks_counts(z: Sizes) -> Counts:
    """Return the counts: Q and O once, K and V once per block of rows."""
    return {
        "q": Count(z.q, 0),
        "k": Count(z.q_tiles * z.k, 0),
        "v": Count(z.q_tiles * z.v, 0),
        "out": Count(0, z.out),
    }


def forward_output_slots(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
    block_k: int,
    slots: int,
) -> Memories:
    """Keep a key tile, and the states of the first query tiles throughout.

    [000], "Outer product style": each output slot in fast memory saves
    n - 1 stores of its output, for n key tiles. Without slots it is
    `traffic.forward_key_outer`; with a slot for every query tile O is stored
    once, as by `traffic.forward_query_outer`.

    Parameters
    ----------
    q, k, v, scale, block_q, block_k
        As in `traffic.forward_key_outer`.
    slots : int
        Query tiles whose m, l and O stay in fast memory, in addition to the
        one that is being updated.

    Returns
    -------
    dict of str to Memory
        q, k, v, out, m, l.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    nothing = TileState.empty((len(q),), v.shape[-1])
    zeros = {"out": nothing.acc, "m": nothing.m, "l": nothing.l}
    slow = memories_of(q=q, k=k, v=v, **zeros)
    q_tiles = tile_slices(len(q), block_q)
    kept = {
        index: TileState.empty((rows.stop - rows.start,), v.shape[-1])
        for index, rows in enumerate(q_tiles[:slots])
    }
    for keys in tile_slices(len(k), block_k):
        k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
        for index, rows in enumerate(q_tiles):
            s = scores_of(slow["q"].load(rows), k_j, scale)
            if index in kept:
                kept[index] = kept[index].update(s, v_j)
            else:
                state = _load_state(slow, rows)
                _store_state(slow, rows, state.update(s, v_j))
    for index, state in kept.items():
        _store_state(slow, q_tiles[index], state)
    return slow


def forward_output_slots_counts(z: Sizes, slots: int) -> Counts:
    """Return key-outer's counts, but a kept state is stored once."""
    n = z.k_tiles
    kept = min(slots * z.block_q, z.seqlen_q)
    streamed = z.seqlen_q - kept

    def of_state(columns: int) -> Count:
        loads = n * streamed * columns
        return Count(loads, loads + kept * columns)

    return {
        "q": Count(n * z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": of_state(z.head_dim_v),
        "m": of_state(1),
        "l": of_state(1),
    }


def _load_state(slow: Memories, rows: slice) -> TileState:
    """Load m, l and O; O is stored divided by l."""
    m, l = slow["m"].load(rows), slow["l"].load(rows)  # noqa: E741
    return TileState(m, l, slow["out"].load(rows) * l[:, None])


def _store_state(slow: Memories, rows: slice, state: TileState) -> None:
    slow["out"].store(rows, state.finalize()[0])
    slow["m"].store(rows, state.m)
    slow["l"].store(rows, state.l)


# -------------------------------------------------------------------- backward


def backward_row_blocks(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
) -> Memories:
    """Compute block_q rows of P, dP and dS together, whole.

    [003], eq. 58 to 70. P is the softmax of its rows, without lse. dK and dV
    are loaded, updated and stored for every block of rows.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, dq, dk, dv.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    slow = memories_of(dout=dout, q=q, k=k, v=v, out=out)
    slow |= _zeros(dq=q, dk=k, dv=v)
    for rows in tile_slices(len(q), block_q):
        dout_i, q_i = slow["dout"].load(rows), slow["q"].load(rows)
        gamma_i = delta_of(dout_i, slow["out"].load(rows))
        k_all = slow["k"].load()
        p = safe_softmax(scores_of(q_i, k_all, scale))
        dp = dout_i @ slow["v"].load().T
        ds = score_gradient(p, dp, gamma_i)
        slow["dv"].store(ALL, slow["dv"].load() + p.T @ dout_i)
        slow["dk"].store(ALL, slow["dk"].load() + scale * ds.T @ q_i)
        slow["dq"].store(rows, scale * ds @ k_all)
    return slow


def backward_row_blocks_counts(z: Sizes) -> Counts:
    """Return the counts: K, V, dK and dV once per block of rows."""
    n = z.q_tiles
    return {
        "dout": Count(z.out, 0),
        "q": Count(z.q, 0),
        "k": Count(n * z.k, 0),
        "v": Count(n * z.v, 0),
        "out": Count(z.out, 0),
        "dq": Count(0, z.q),
        "dk": Count(n * z.k, n * z.k),
        "dv": Count(n * z.v, n * z.v),
    }


def backward_key_outer_draft(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
    block_k: int,
) -> Memories:
    """Compute delta in the inner loop, again for every key tile.

    [003], Algorithm 7, eq. 80; what it omits is as in Algorithm 8,
    `traffic.backward_key_outer`, which computes delta first and stores it.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, lse, dq, dk, dv.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    slow = memories_of(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    slow |= _zeros(dq=q, dk=k, dv=v)
    for keys in tile_slices(len(k), block_k):
        k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
        dk_j, dv_j = np.zeros(k_j.shape), np.zeros(v_j.shape)
        for rows in tile_slices(len(q), block_q):
            dout_i, lse_i = slow["dout"].load(rows), slow["lse"].load(rows)
            delta_i = delta_of(dout_i, slow["out"].load(rows))
            q_i = slow["q"].load(rows)
            p, ds = tile_weights(q_i, k_j, v_j, dout_i, lse_i, delta_i, scale)
            dv_j += p.T @ dout_i
            dk_j += scale * ds.T @ q_i
            dq_i = slow["dq"].load(rows) + scale * ds @ k_j
            slow["dq"].store(rows, dq_i)
        slow["dk"].store(keys, dk_j)
        slow["dv"].store(keys, dv_j)
    return slow


def backward_key_outer_draft_counts(z: Sizes) -> Counts:
    """Return the counts: Q, dO, O and dQ once per key tile."""
    n = z.k_tiles
    return {
        "dout": Count(n * z.out, 0),
        "q": Count(n * z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": Count(n * z.out, 0),
        "lse": Count(n * z.seqlen_q, 0),
        "dq": Count(n * z.q, n * z.q),
        "dk": Count(0, z.k),
        "dv": Count(0, z.v),
    }


def backward_without_delta(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
    block_k: int,
) -> Memories:
    r"""Keep a query tile; visit its key tiles twice, first to sum D.

    .. math:: D_i = \sum_j P_{ij} dP_{ij}

    [000], "The D_i trick: why it matters". dS needs D, and D from P and dP
    needs the whole row; D from dO and O needs neither
    (`backward.delta`), and so the first visit falls away. S and dP are
    computed twice: 14 T^2 d operations instead of 10 T^2 d.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, lse, dq, dk, dv.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    slow = memories_of(dout=dout, q=q, k=k, v=v, lse=lse)
    slow |= _zeros(dq=q, dk=k, dv=v)
    for rows in tile_slices(len(q), block_q):
        dout_i, lse_i = slow["dout"].load(rows), slow["lse"].load(rows)
        q_i = slow["q"].load(rows)
        delta_i, dq_i = np.zeros(len(q_i)), np.zeros(q_i.shape)
        for keys in tile_slices(len(k), block_k):
            s = scores_of(q_i, slow["k"].load(keys), scale)
            p = probabilities_from_lse(s, lse_i)
            delta_i += weighted_sum(p, dout_i @ slow["v"].load(keys).T)
        for keys in tile_slices(len(k), block_k):
            k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
            p, ds = tile_weights(q_i, k_j, v_j, dout_i, lse_i, delta_i, scale)
            slow["dv"].store(keys, slow["dv"].load(keys) + p.T @ dout_i)
            dk_j = slow["dk"].load(keys) + scale * ds.T @ q_i
            slow["dk"].store(keys, dk_j)
            dq_i += scale * ds @ k_j
        slow["dq"].store(rows, dq_i)
    return slow


def backward_without_delta_counts(z: Sizes) -> Counts:
    """Return query-outer's counts without O, with K and V loaded twice."""
    n = z.q_tiles
    return {
        "dout": Count(z.out, 0),
        "q": Count(z.q, 0),
        "k": Count(2 * n * z.k, 0),
        "v": Count(2 * n * z.v, 0),
        "lse": Count(z.seqlen_q, 0),
        "dq": Count(0, z.q),
        "dk": Count(n * z.k, n * z.k),
        "dv": Count(n * z.v, n * z.v),
    }


def _zeros(**like: np.ndarray) -> Memories:
    return memories_of(**{name: np.zeros(x.shape) for name, x in like.items()})
