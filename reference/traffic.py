r"""Loads and stores of slow memory for each schedule.

The model of [003] has two memories: a small, fast one, on which all
arithmetic works, and a large, slow one, which holds the arrays. Each schedule
below computes its results and accesses slow memory only through `Memory`,
which counts; ``..._counts`` returns its counts in closed form. Both count the
elements of one head without a mask, and agree exactly.

The leading terms, in elements, with T x d matrices and n = T / B tiles of
queries and of keys, are::

    forward                        backward
    materialised   4 T^2           materialised   7 T^2
    row by row     4 T d           row by row     8 T d
    query-outer    2 n T d         query-outer    6 n T d
    key-outer      3 n T d         key-outer      4 n T d
    split keys     2 n T d         two-pass       4 n T d

These counts differ from the sources as follows:

- [000] counts n loads of O for query-outer, "initialize once per query".
  Here the state starts as zeros in fast memory; nothing is loaded.
- [003] says that the inner loop of forward key-outer loads two matrices and
  stores a matrix and a vector. Its algorithm also loads the vector. The
  maximum, which [003] omits, makes two vectors, each loaded and stored.
- [003] counts 4 matrices per iteration of backward query-outer and 3 of
  key-outer: the operands loaded and the gradients stored. But dK += ... also
  loads the old dK: query-outer reloads dK and dV, key-outer dQ. That makes
  6 and 4 (`inner_loop_query_outer`, `inner_loop_key_outer`).
- [003] writes these as 4 T_r B_c d and 3 T_c B_r d. The first lacks a factor
  T_c, the second T_r: both loops together make 4 T_r T d and 3 T_c T d.

- [002] calls the 4 T^2 accesses of materialised forward four round trips: S
  and P make one each. Its summary has O(N^2 d) of them, which is the number
  of operations; the accesses are O(N^2).

Filling arrays with their initial values (0, or -inf for m) is not counted.
Arrays must be finite here; `forward` and `backward` accept any values.

`early_schedules` has the schedules that the sources try first.

Sources: [000], "Cost comparison"; [001]; [002], "Standard attention memory
access pattern"; [003], "Memory accesses" and Algorithms 1 to 8.

Example
-------
What forward moves, with 64 tokens, head_dim 8, and tiles of 16:

>>> import numpy as np
>>> from cuflash.reference import traffic
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 64, 8))
>>> slow = traffic.forward_query_outer(q, k, v, block_q=16, block_k=16)
>>> print(traffic.report(traffic.counts_of(slow)))
          loads    stores
q           512         0
k         2,048         0
v         2,048         0
out           0       512
lse           0        64
total     4,608       576

K and V were read once for each of the four query tiles. The closed forms say
so without running it:

>>> sizes = traffic.Sizes(64, 64, 8, 8, block_q=16, block_k=16)
>>> counts = traffic.forward_query_outer_counts(sizes)
>>> counts == traffic.counts_of(slow)
True
>>> traffic.total(traffic.forward_materialised_counts(sizes))
18432
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .attention import default_scale, scores_of
from .backward import delta as delta_of
from .masks import tile_slices
from .softmax import safe_softmax, score_gradient
from .tile_state import TileState, merge_tree, probabilities_from_lse

ALL = slice(None)


class Count(NamedTuple):
    """Elements loaded and stored."""

    loads: int
    stores: int


Counts = dict[str, Count]


class Memory:
    """An array in slow memory that counts element loads and stores.

    Parameters
    ----------
    array : array_like
        The initial values, copied.

    Attributes
    ----------
    array : ndarray of float64
        The current values. Reading this attribute is not counted, so a
        schedule must not use it.
    loads, stores : int
        Elements loaded and stored so far.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.array(array, np.float64)
        self.loads = 0
        self.stores = 0

    def load(self, index: slice | tuple = ALL) -> np.ndarray:
        """Return a copy of the elements at index, in fast memory."""
        values = self.array[index].copy()
        self.loads += values.size
        return values

    def store(self, index: slice | tuple, values: np.ndarray) -> None:
        """Write values to the elements at index."""
        self.stores += self.array[index].size
        self.array[index] = values


Memories = dict[str, Memory]


def memories_of(**arrays: np.ndarray) -> Memories:
    """Return slow memory that holds these arrays, by name."""
    return {name: Memory(array) for name, array in arrays.items()}


def counts_of(memories: Memories) -> Counts:
    """Return the counts of each array in a schedule's slow memory."""
    return {name: Count(x.loads, x.stores) for name, x in memories.items()}


def total(counts: Counts) -> int:
    """Return the loads plus the stores of all arrays, in elements."""
    return sum(count.loads + count.stores for count in counts.values())


def report(counts: Counts) -> str:
    """Return a table of the counts: a line for each array, and the sum."""
    width = max(map(len, [*counts, "total"]))
    lines = [f"{'':{width}} {'loads':>9} {'stores':>9}"]
    for name, count in counts.items():
        lines += [f"{name:{width}} {count.loads:9,} {count.stores:9,}"]
    sums = (sum(x) for x in zip(*counts.values(), strict=True))
    lines += [f"{'total':{width}}" + "".join(f" {x:9,}" for x in sums)]
    return "\n".join(lines)


@dataclass(frozen=True)
class Sizes:
    """The sizes on which traffic depends.

    The properties q, k, v, out and scores are the numbers of elements of
    these matrices; q_tiles and k_tiles are T_r and T_c of [003].
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    block_q: int = 1
    block_k: int = 1
    num_splits: int = 1

    @property
    def q(self) -> int:
        return self.seqlen_q * self.head_dim

    @property
    def k(self) -> int:
        return self.seqlen_k * self.head_dim

    @property
    def v(self) -> int:
        return self.seqlen_k * self.head_dim_v

    @property
    def out(self) -> int:
        return self.seqlen_q * self.head_dim_v

    @property
    def scores(self) -> int:
        return self.seqlen_q * self.seqlen_k

    @property
    def q_tiles(self) -> int:
        return -(-self.seqlen_q // self.block_q)

    @property
    def k_tiles(self) -> int:
        return -(-self.seqlen_k // self.block_k)


# -------------------------------------------------------------------- forward
#
# Each schedule takes q (seqlen_q, head_dim), k (seqlen_k, head_dim) and
# v (seqlen_k, head_dim_v), and returns its slow memory: "out" is
# (seqlen_q, head_dim_v), and "lse", if present, (seqlen_q,).


def forward_materialised(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
) -> Memories:
    """Compute S, P and O by three operations on whole matrices.

    [003], eq. 25 to 30: S and P are each stored and loaded, 4 T^2 accesses.
    T x T matrices pass through fast memory row by row ([003] assumes that
    "the computer has a way"); the T x d operands of an operation stay there
    while it runs.

    Returns
    -------
    dict of str to Memory
        q, k, v, s, p, out.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    square = np.zeros((len(q), len(k)))
    out = np.zeros((len(q), v.shape[-1]))
    slow = memories_of(q=q, k=k, v=v, s=square, p=square, out=out)

    k_all = slow["k"].load()
    for row in tile_slices(len(q), 1):
        slow["s"].store(row, scores_of(slow["q"].load(row), k_all, scale))
    for row in tile_slices(len(q), 1):
        slow["p"].store(row, safe_softmax(slow["s"].load(row)))
    v_all = slow["v"].load()
    for row in tile_slices(len(q), 1):
        slow["out"].store(row, slow["p"].load(row) @ v_all)
    return slow


def forward_materialised_counts(z: Sizes) -> Counts:
    """Return the counts: 4 T^2 for S and P, each T x d matrix once."""
    return {
        "q": Count(z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "s": Count(z.scores, z.scores),
        "p": Count(z.scores, z.scores),
        "out": Count(0, z.out),
    }


def forward_row_by_row(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
) -> Memories:
    """Keep q, k and v in fast memory; store out row by row.

    [003], Algorithm 1: 4 T d accesses, if fast memory holds T x d matrices.

    Returns
    -------
    dict of str to Memory
        q, k, v, out.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out = np.zeros((len(q), v.shape[-1]))
    slow = memories_of(q=q, k=k, v=v, out=out)
    q_all, k_all, v_all = (slow[name].load() for name in "qkv")
    for row in tile_slices(len(q), 1):
        p = safe_softmax(scores_of(q_all[row], k_all, scale))
        slow["out"].store(row, p @ v_all)
    return slow


def forward_row_by_row_counts(z: Sizes) -> Counts:
    """Return everything once: the least that any schedule can do."""
    return {
        "q": Count(z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": Count(0, z.out),
    }


def forward_query_outer(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
    block_k: int,
) -> Memories:
    """Keep a query tile and its state; stream the tiles of k and v.

    [003], Algorithm 3 (FlashAttention-2); [000], "inner product style".

    Returns
    -------
    dict of str to Memory
        q, k, v, out, lse.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out = np.zeros((len(q), v.shape[-1]))
    slow = memories_of(q=q, k=k, v=v, out=out, lse=np.zeros(len(q)))
    for rows in tile_slices(len(q), block_q):
        q_i = slow["q"].load(rows)
        state = TileState.empty(q_i.shape[:1], v.shape[-1])
        for keys in tile_slices(len(k), block_k):
            s = scores_of(q_i, slow["k"].load(keys), scale)
            state = state.update(s, slow["v"].load(keys))
        out_i, lse_i = state.finalize()
        slow["out"].store(rows, out_i)
        slow["lse"].store(rows, lse_i)
    return slow


def forward_query_outer_counts(z: Sizes) -> Counts:
    """Return the counts: Q and O once, K and V once per query tile."""
    return {
        "q": Count(z.q, 0),
        "k": Count(z.q_tiles * z.k, 0),
        "v": Count(z.q_tiles * z.v, 0),
        "out": Count(0, z.out),
        "lse": Count(0, z.seqlen_q),
    }


def forward_key_outer(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
    block_k: int,
) -> Memories:
    """Keep a key tile; stream q and the states of the query tiles.

    [003], Algorithm 4 (FlashAttention), with the maximum, which it omits;
    [000], "outer product style". Each store of out is already divided by l,
    so the last one is the result. lse = m + log(l) is not stored.

    Returns
    -------
    dict of str to Memory
        q, k, v, out, m, l.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    nothing = TileState.empty((len(q),), v.shape[-1])
    state = {"out": nothing.acc, "m": nothing.m, "l": nothing.l}
    slow = memories_of(q=q, k=k, v=v, **state)
    for keys in tile_slices(len(k), block_k):
        k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
        for rows in tile_slices(len(q), block_q):
            m_i, l_i = slow["m"].load(rows), slow["l"].load(rows)
            s = scores_of(slow["q"].load(rows), k_j, scale)
            acc_i = slow["out"].load(rows) * l_i[:, None]
            new = TileState(m_i, l_i, acc_i).update(s, v_j)
            slow["out"].store(rows, new.finalize()[0])
            slow["m"].store(rows, new.m)
            slow["l"].store(rows, new.l)
    return slow


def forward_key_outer_counts(z: Sizes) -> Counts:
    """Return the counts: K and V once, Q and the state per key tile."""
    n = z.k_tiles
    return {
        "q": Count(n * z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": Count(n * z.out, n * z.out),
        "m": Count(n * z.seqlen_q, n * z.seqlen_q),
        "l": Count(n * z.seqlen_q, n * z.seqlen_q),
    }


def forward_split_keys(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int,
    block_k: int,
    num_splits: int,
) -> Memories:
    """Compute (out, lse) of each run of keys, then merge the runs.

    [000], "The tile abstraction": the merge is associative. The partial
    results are stored to slow memory and loaded again.

    Returns
    -------
    dict of str to Memory
        q, k, v, partial_out, partial_lse, out, lse.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out, lse = np.zeros((len(q), v.shape[-1])), np.zeros(len(q))
    partial = {
        "partial_out": np.zeros((num_splits, *out.shape)),
        "partial_lse": np.zeros((num_splits, *lse.shape)),
    }
    slow = memories_of(q=q, k=k, v=v, **partial, out=out, lse=lse)
    key_tiles = tile_slices(len(k), block_k)
    run = -(-len(key_tiles) // num_splits)
    for split in range(num_splits):
        for rows in tile_slices(len(q), block_q):
            q_i = slow["q"].load(rows)
            state = TileState.empty(q_i.shape[:1], v.shape[-1])
            for keys in key_tiles[split * run : (split + 1) * run]:
                s = scores_of(q_i, slow["k"].load(keys), scale)
                state = state.update(s, slow["v"].load(keys))
            out_i, lse_i = state.finalize()
            slow["partial_out"].store((split, rows), out_i)
            slow["partial_lse"].store((split, rows), lse_i)
    for rows in tile_slices(len(q), block_q):
        outs = slow["partial_out"].load((ALL, rows))
        lses = slow["partial_lse"].load((ALL, rows))
        states = [
            TileState.of_result(*part) for part in zip(outs, lses, strict=True)
        ]
        out_i, lse_i = merge_tree(states).finalize()
        slow["out"].store(rows, out_i)
        slow["lse"].store(rows, lse_i)
    return slow


def forward_split_keys_counts(z: Sizes) -> Counts:
    """Return query-outer's counts, Q per split, the partial results."""
    n = z.num_splits
    return {
        "q": Count(n * z.q, 0),
        "k": Count(z.q_tiles * z.k, 0),
        "v": Count(z.q_tiles * z.v, 0),
        "partial_out": Count(n * z.out, n * z.out),
        "partial_lse": Count(n * z.seqlen_q, n * z.seqlen_q),
        "out": Count(0, z.out),
        "lse": Count(0, z.seqlen_q),
    }


# ------------------------------------------------------------------- backward
#
# dout and out are (seqlen_q, head_dim_v), lse is (seqlen_q,). The returned
# slow memory holds the gradients as "dq", "dk" and "dv".


def backward_materialised(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    p: np.ndarray,
    *,
    scale: float | None = None,
) -> Memories:
    """Compute dV, dP, dS, dQ and dK by operations on whole matrices.

    [003], eq. 31 and 32: P is loaded; dP is stored; P and dP are loaded and
    dS is stored; dS is loaded twice: 7 T^2 accesses. The T x d operands and
    results of an operation stay in fast memory while it runs.

    Parameters
    ----------
    dout, q, k, v, out : ndarray
    p : ndarray, (seqlen_q, seqlen_k)
        The weights, stored by a materialised forward pass.
    scale : float, optional

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, p, dp, ds, dq, dk, dv.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    square = np.zeros(p.shape)
    slow = memories_of(dout=dout, q=q, k=k, v=v, out=out, p=p)
    slow |= memories_of(dp=square, ds=square)
    slow |= memories_of(dq=np.zeros(q.shape), dk=np.zeros(k.shape))
    slow |= memories_of(dv=np.zeros(v.shape))

    dv = np.zeros(v.shape)
    for row in tile_slices(len(q), 1):
        dv += slow["p"].load(row).T @ slow["dout"].load(row)
    slow["dv"].store(ALL, dv)

    v_all = slow["v"].load()
    for row in tile_slices(len(q), 1):
        slow["dp"].store(row, slow["dout"].load(row) @ v_all.T)

    for row in tile_slices(len(q), 1):
        gamma = delta_of(slow["dout"].load(row), slow["out"].load(row))
        p_i, dp_i = slow["p"].load(row), slow["dp"].load(row)
        slow["ds"].store(row, score_gradient(p_i, dp_i, gamma))

    k_all = slow["k"].load()
    for row in tile_slices(len(q), 1):
        slow["dq"].store(row, scale * slow["ds"].load(row) @ k_all)

    dk = np.zeros(k.shape)
    for row in tile_slices(len(q), 1):
        dk += scale * slow["ds"].load(row).T @ slow["q"].load(row)
    slow["dk"].store(ALL, dk)
    return slow


def backward_materialised_counts(z: Sizes) -> Counts:
    """Return the counts: 7 T^2 for P, dP and dS; dO is read 3 times."""
    return {
        "dout": Count(3 * z.out, 0),
        "q": Count(z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": Count(z.out, 0),
        "p": Count(2 * z.scores, 0),
        "dp": Count(z.scores, z.scores),
        "ds": Count(2 * z.scores, z.scores),
        "dq": Count(0, z.q),
        "dk": Count(0, z.k),
        "dv": Count(0, z.v),
    }


def backward_row_by_row(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    *,
    scale: float | None = None,
) -> Memories:
    """Keep all T x d matrices in fast memory; compute P row by row.

    [003], Algorithm 5: 8 T d accesses. P is the softmax of its row, without
    lse.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, dq, dk, dv.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    slow = memories_of(dout=dout, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv)
    q, k, v = (slow[name].load() for name in "qkv")
    dout, out = slow["dout"].load(), slow["out"].load()
    for row in tile_slices(len(q), 1):
        p_i = safe_softmax(scores_of(q[row], k, scale))
        dv += p_i.T @ dout[row]
        gamma = delta_of(dout[row], out[row])
        ds_i = score_gradient(p_i, dout[row] @ v.T, gamma)
        dq[row] = scale * ds_i @ k
        dk += scale * ds_i.T @ q[row]
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        slow[name].store(ALL, gradient)
    return slow


def backward_row_by_row_counts(z: Sizes) -> Counts:
    """Return everything once: the least that any schedule can do."""
    return {
        "dout": Count(z.out, 0),
        "q": Count(z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": Count(z.out, 0),
        "dq": Count(0, z.q),
        "dk": Count(0, z.k),
        "dv": Count(0, z.v),
    }


def backward_query_outer(
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
    """Keep a query tile and its dq; stream k and v, update dk and dv.

    [003], Algorithm 6. delta is computed per query tile and never stored.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, lse, dq, dk, dv.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    slow = _backward_memories(dout, q, k, v, out, lse)
    for rows in tile_slices(len(q), block_q):
        dout_i, lse_i = slow["dout"].load(rows), slow["lse"].load(rows)
        delta_i = delta_of(dout_i, slow["out"].load(rows))
        q_i = slow["q"].load(rows)
        dq_i = np.zeros(q_i.shape)
        for keys in tile_slices(len(k), block_k):
            k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
            p, ds = tile_weights(q_i, k_j, v_j, dout_i, lse_i, delta_i, scale)
            dv_j = slow["dv"].load(keys) + p.T @ dout_i
            slow["dv"].store(keys, dv_j)
            dk_j = slow["dk"].load(keys) + scale * ds.T @ q_i
            slow["dk"].store(keys, dk_j)
            dq_i += scale * ds @ k_j
        slow["dq"].store(rows, dq_i)
    return slow


def backward_query_outer_counts(z: Sizes) -> Counts:
    """Return the counts: K, V, dK and dV once per query tile."""
    n = z.q_tiles
    return {
        "dout": Count(z.out, 0),
        "q": Count(z.q, 0),
        "k": Count(n * z.k, 0),
        "v": Count(n * z.v, 0),
        "out": Count(z.out, 0),
        "lse": Count(z.seqlen_q, 0),
        "dq": Count(0, z.q),
        "dk": Count(n * z.k, n * z.k),
        "dv": Count(n * z.v, n * z.v),
    }


def backward_key_outer(
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
    """Keep a key tile with its dk and dv; stream q, update dq.

    [003], Algorithm 8. delta is computed first and stored, so that out is
    not loaded for every key tile.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, lse, dq, dk, dv, delta.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    slow = _backward_memories(dout, q, k, v, out, lse)
    slow |= memories_of(delta=np.zeros(len(q)))
    _store_delta(slow, block_q)
    for keys in tile_slices(len(k), block_k):
        k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
        dk_j, dv_j = np.zeros(k_j.shape), np.zeros(v_j.shape)
        for rows in tile_slices(len(q), block_q):
            q_i, dout_i, lse_i, delta_i = _load_rows(slow, rows)
            p, ds = tile_weights(q_i, k_j, v_j, dout_i, lse_i, delta_i, scale)
            dv_j += p.T @ dout_i
            dk_j += scale * ds.T @ q_i
            dq_i = slow["dq"].load(rows) + scale * ds @ k_j
            slow["dq"].store(rows, dq_i)
        slow["dk"].store(keys, dk_j)
        slow["dv"].store(keys, dv_j)
    return slow


def backward_key_outer_counts(z: Sizes) -> Counts:
    """Return the counts: Q, dO and dQ once per key tile."""
    n = z.k_tiles
    return {
        "dout": Count((n + 1) * z.out, 0),
        "q": Count(n * z.q, 0),
        "k": Count(z.k, 0),
        "v": Count(z.v, 0),
        "out": Count(z.out, 0),
        "lse": Count(n * z.seqlen_q, 0),
        "dq": Count(n * z.q, n * z.q),
        "dk": Count(0, z.k),
        "dv": Count(0, z.v),
        "delta": Count(n * z.seqlen_q, z.seqlen_q),
    }


def backward_two_pass(
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
    """Compute dk and dv in one loop and dq in another.

    [001], "Blockwise backward algorithm". S and dP are computed twice, but
    every accumulator stays in fast memory and is stored once.

    Returns
    -------
    dict of str to Memory
        dout, q, k, v, out, lse, dq, dk, dv, delta.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    slow = _backward_memories(dout, q, k, v, out, lse)
    slow |= memories_of(delta=np.zeros(len(q)))
    _store_delta(slow, block_q)
    for keys in tile_slices(len(k), block_k):
        k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
        dk_j, dv_j = np.zeros(k_j.shape), np.zeros(v_j.shape)
        for rows in tile_slices(len(q), block_q):
            q_i, dout_i, lse_i, delta_i = _load_rows(slow, rows)
            p, ds = tile_weights(q_i, k_j, v_j, dout_i, lse_i, delta_i, scale)
            dv_j += p.T @ dout_i
            dk_j += scale * ds.T @ q_i
        slow["dk"].store(keys, dk_j)
        slow["dv"].store(keys, dv_j)
    for rows in tile_slices(len(q), block_q):
        q_i, dout_i, lse_i, delta_i = _load_rows(slow, rows)
        dq_i = np.zeros(q_i.shape)
        for keys in tile_slices(len(k), block_k):
            k_j, v_j = slow["k"].load(keys), slow["v"].load(keys)
            p, ds = tile_weights(q_i, k_j, v_j, dout_i, lse_i, delta_i, scale)
            dq_i += scale * ds @ k_j
        slow["dq"].store(rows, dq_i)
    return slow


def backward_two_pass_counts(z: Sizes) -> Counts:
    """Return the counts: Q, dO per key tile; K, V per query tile."""
    over_keys, over_queries = z.k_tiles, z.q_tiles
    return {
        "dout": Count((over_keys + 2) * z.out, 0),
        "q": Count((over_keys + 1) * z.q, 0),
        "k": Count((over_queries + 1) * z.k, 0),
        "v": Count((over_queries + 1) * z.v, 0),
        "out": Count(z.out, 0),
        "lse": Count((over_keys + 1) * z.seqlen_q, 0),
        "dq": Count(0, z.q),
        "dk": Count(0, z.k),
        "dv": Count(0, z.v),
        "delta": Count((over_keys + 1) * z.seqlen_q, z.seqlen_q),
    }


def inner_loop_query_outer(z: Sizes, *, reload: bool = True) -> int:
    """Return the matrix elements that backward query-outer's loop accesses.

    Each of T_r T_c iterations loads K_j and V_j and stores dK_j and dV_j:
    4 T_r T d if head_dim_v = head_dim ([003], "(i, j) versus (j, i)").

    Parameters
    ----------
    z : Sizes
    reload : bool, optional
        Count the loads of dK_j and dV_j too, which [003] omits: 6 T_r T d.
    """
    return z.q_tiles * (3 if reload else 2) * (z.k + z.v)


def inner_loop_key_outer(z: Sizes, *, reload: bool = True) -> int:
    """Return the matrix elements that backward key-outer's loop accesses.

    Each of T_c T_r iterations loads Q_i and dO_i and stores dQ_i: 3 T_c T d
    if head_dim_v = head_dim, fewer than query-outer if T_r = T_c. The loads
    of the vectors lse and delta, 2 T_c T, are not included.

    Parameters
    ----------
    z : Sizes
    reload : bool, optional
        Count the loads of dQ_i too, which [003] omits: 4 T_c T d.
    """
    return z.k_tiles * ((3 if reload else 2) * z.q + z.out)


def tile_weights(
    q_i: np.ndarray,
    k_j: np.ndarray,
    v_j: np.ndarray,
    dout_i: np.ndarray,
    lse_i: np.ndarray,
    delta_i: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Return P and dS of a tile whose operands are in fast memory.

    .. math:: P = e^{S - lse},\quad dS = P \circ (dO V^T - D)

    [001], "Blockwise equations".

    Returns
    -------
    p, ds : ndarray, (rows, keys)
    """
    p = probabilities_from_lse(scores_of(q_i, k_j, scale), lse_i)
    return p, score_gradient(p, dout_i @ v_j.T, delta_i)


def _backward_memories(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
) -> Memories:
    """Return slow memory with the arguments and zero gradients."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    slow = memories_of(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    return slow | memories_of(dq=dq, dk=dk, dv=dv)


def _store_delta(slow: Memories, block_q: int) -> None:
    """Compute delta tile by tile: load dO and O once, store delta."""
    for rows in tile_slices(len(slow["out"].array), block_q):
        dout_i, out_i = slow["dout"].load(rows), slow["out"].load(rows)
        slow["delta"].store(rows, delta_of(dout_i, out_i))


def _load_rows(slow: Memories, rows: slice) -> tuple[np.ndarray, ...]:
    """Load a query tile's rows of q, dout, lse and delta."""
    return tuple(slow[x].load(rows) for x in ("q", "dout", "lse", "delta"))
