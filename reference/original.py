r"""FlashAttention as first published: O is divided by l after every tile.

A row's state is (m, l, O): the maximum and the sum over the keys so far, and
the attention over them. A tile of keys has a maximum and a sum of its own;
two factors bring both sides to the common maximum:

.. math::
    \tilde m &= \mathrm{rowmax}(S),\quad P = e^{S - \tilde m},\quad
    \tilde l = \mathrm{rowsum}(P) \\
    m' &= \max(m, \tilde m),\quad
    \alpha = e^{m - m'},\quad \beta = e^{\tilde m - m'} \\
    l' &= \alpha l + \beta \tilde l \\
    O' &= (\alpha l O + \beta P V) / l'

FlashAttention-2 keeps l O, without the division and without beta, and divides
once at the end (`tile_state`, `forward.query_outer`). `forward.key_outer` is
this module's loop with beta inside P and with all options.

Sources: [004], sections 10.2.2 to 10.2.4; [FA] Dao et al. 2022,
arXiv:2205.14135, Algorithms 1, 2 and 4. Two statements of [004] differ:

- Section 10.2.3 keeps a query tile and scans the keys, the order of
  FlashAttention-2. Section 10.2.5 and [FA] keep a key tile, as here. The
  update is the same in both.
- Section 10.2.4 first writes dS = dP P - rowsum(dP P). The second term lacks
  its factor P; the formula that the section ends with, dS = P (dP - delta),
  is the gradient.

Shapes: q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k,
head_dim_v). Arithmetic is in the dtype of the arguments, which must be
finite: the demo of [004] is in float32.

Example
-------
One row, four keys, tiles of two. After the first tile O is the attention over
two keys, after the second over all four:

>>> import numpy as np
>>> from cuflash.reference import original
>>> scores = np.log([[1.0, 2.0, 4.0, 1.0]])
>>> values = np.array([[8.0], [8.0], [0.0], [16.0]])
>>> m, l, o = np.array([-np.inf]), np.zeros(1), np.zeros((1, 1))
>>> for tile in (slice(0, 2), slice(2, 4)):
...     m, l, o = original.update(m, l, o, scores[:, tile], values[tile])
...     print(f"m = log {np.exp(m[0]):.0f}, l = {l[0]:.2f}, O = {o[0, 0]:.1f}")
m = log 2, l = 1.50, O = 8.0
m = log 4, l = 2.00, O = 5.0

The demo of [004]: 128 tokens, head_dim 64, tiles of 32, float32. Its largest
errors are 4.8e-7 for out and 6.6e-7, 1.8e-7 and 1.5e-7 for dq, dk and dv,
beside plain attention in float32. Here they are beside float64:

>>> from cuflash.reference.attention import attention, attention_vjp
>>> rng = np.random.default_rng(0)
>>> q, k, v, dout = rng.standard_normal((4, 128, 64), np.float32)
>>> blocks = {"block_q": 32, "block_k": 32}
>>> out, m, l = original.forward(q, k, v, **blocks)
>>> print(np.abs(out - attention(q, k, v)[0]).max() < 4.8e-7)
True
>>> gradients = original.backward(dout, q, k, v, out, m, l, **blocks)
>>> exact = attention_vjp(dout, q, k, v)
>>> for got, expected in zip(gradients, exact, strict=True):
...     print(np.abs(got - expected).max() < 1e-6)
True
True
True
"""

from __future__ import annotations

import numpy as np

from .attention import default_scale
from .masks import tile_slices
from .softmax import score_gradient

State = tuple[np.ndarray, np.ndarray, np.ndarray]


def update(
    m: np.ndarray,
    l: np.ndarray,  # noqa: E741 (the papers' name)
    o: np.ndarray,
    scores: np.ndarray,
    values: np.ndarray,
) -> State:
    r"""Return (m', l', O') after one more tile of keys.

    .. math:: O' = (\alpha l O + \beta P V) / l'

    [004], section 10.2.2; [FA], Algorithm 1, lines 10 to 13.

    Parameters
    ----------
    m, l : ndarray, (rows,)
        Before the first tile -inf and 0.
    o : ndarray, (rows, head_dim_v)
        Before the first tile 0.
    scores : ndarray, (rows, keys)
        One key or more.
    values : ndarray, (keys, head_dim_v)

    Returns
    -------
    m, l, o : ndarray
    """
    m_tile = scores.max(axis=-1)
    p = np.exp(scores - m_tile[:, None])
    l_tile = p.sum(axis=-1)

    m_new = np.maximum(m, m_tile)
    alpha, beta = np.exp(m - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l + beta * l_tile
    old = (alpha * l)[:, None] * o
    new = beta[:, None] * (p @ values)
    return m_new, l_new, (old + new) / l_new[:, None]


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
) -> State:
    """Keep a key tile; update the state of every query tile with it.

    [004], section 10.2.5; [FA], Algorithm 1.

    Parameters
    ----------
    q, k, v : ndarray
    scale : float, optional
        Default head_dim ** -0.5.
    block_q, block_k : int, optional
        Tile sizes; they need not divide the lengths.

    Returns
    -------
    out : ndarray, (seqlen_q, head_dim_v)
    m, l : ndarray, (seqlen_q,)
        What `backward` needs besides out.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    m = np.full(len(q), -np.inf, q.dtype)
    l = np.zeros(len(q), q.dtype)  # noqa: E741
    o = np.zeros((len(q), v.shape[-1]), q.dtype)
    for keys in tile_slices(len(k), block_k):
        for rows in tile_slices(len(q), block_q):
            s = scale * (q[rows] @ k[keys].T)
            state = update(m[rows], l[rows], o[rows], s, v[keys])
            m[rows], l[rows], o[rows] = state
    return o, m, l


def probabilities(
    scores: np.ndarray,
    m: np.ndarray,
    l: np.ndarray,  # noqa: E741
) -> np.ndarray:
    """Recompute the weights: P = exp(S - m) / l.

    [004], section 10.2.4; [002], "The solution: recomputation". Since
    FlashAttention-2 one number a row is stored, lse = m + log(l)
    (`tile_state.probabilities_from_lse`).

    Parameters
    ----------
    scores : ndarray, (rows, keys)
    m, l : ndarray, (rows,)

    Returns
    -------
    ndarray, (rows, keys)
    """
    return np.exp(scores - m[:, None]) / l[:, None]


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    m: np.ndarray,
    l: np.ndarray,  # noqa: E741
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
) -> State:
    r"""Compute the gradients from m and l; P is recomputed tile by tile.

    .. math::
        dP &= dO V^T,\quad \delta_i = dO_i^T O_i \\
        dS &= P (dP - \delta)

    [004], section 10.2.4; [FA], Algorithm 4.

    Parameters
    ----------
    dout : ndarray, (seqlen_q, head_dim_v)
    q, k, v : ndarray
    out, m, l : ndarray
        From `forward`.
    scale, block_q, block_k
        As in `forward`.

    Returns
    -------
    dq, dk, dv : ndarray
        With the shapes of q, k and v.
    """
    scale = default_scale(q.shape[-1]) if scale is None else scale
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (dout * out).sum(axis=-1)
    for keys in tile_slices(len(k), block_k):
        for rows in tile_slices(len(q), block_q):
            s = scale * (q[rows] @ k[keys].T)
            p = probabilities(s, m[rows], l[rows])
            ds = score_gradient(p, dout[rows] @ v[keys].T, delta[rows])
            dv[keys] += p.T @ dout[rows]
            dk[keys] += scale * (ds.T @ q[rows])
            dq[rows] += scale * (ds @ k[keys])
    return dq, dk, dv
