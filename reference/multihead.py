r"""A multi-head attention layer: projections, heads, and their gradients.

.. math::
    Q &= X W_Q,\quad K = X W_K,\quad V = X W_V, \\
    O_h &= attention(Q_h, K_h, V_h),\quad
    Y = concat(O_1, \dots, O_H) W_O

X is (..., seqlen, width); W_Q (width, num_heads * head_dim), W_K
(width, num_heads_kv * head_dim), W_V (width, num_heads_kv * head_dim_v),
W_O (num_heads * head_dim_v, width_out); the columns of a head are contiguous.
num_heads is a multiple of num_heads_kv, and query head h reads key head
h // group_size, where group_size = num_heads // num_heads_kv. The scale is
head_dim ** -0.5, with the dimension of one head, as in Vaswani et al. 2017,
arXiv:1706.03762; eq. 3 of [003] uses the whole width instead. Sources: [000],
"Through the QKV projections"; [003], eq. 3 to 10 and the appendix.

Example
-------
Four query heads share two key heads; a gradient of the layer against a
difference of it.

>>> import numpy as np
>>> from cuflash.reference import multihead
>>> rng = np.random.default_rng(0)
>>> x, dy = rng.standard_normal((2, 5, 8))  # 5 tokens of width 8
>>> shapes = (8, 12), (8, 6), (8, 6), (12, 8)  # head_dim 3
>>> weights = multihead.Weights(*map(rng.standard_normal, shapes))
>>> heads = {"num_heads": 4, "num_heads_kv": 2, "causal": True}
>>> y = multihead.multi_head_attention(x, weights, **heads)
>>> y.shape
(5, 8)
>>> gradients = multihead.multi_head_attention_vjp(dy, x, weights, **heads)
>>> step = 1e-6 * rng.standard_normal(x.shape)
>>> moved = multihead.multi_head_attention(x + step, weights, **heads)
>>> change, expected = (dy * (moved - y)).sum(), (gradients.dx * step).sum()
>>> print(f"{change / expected:.3f}")
1.000

dX of a single head, with dQ, dK and dV and without them:

>>> wide = multihead.Weights(*rng.standard_normal((4, 8, 8)))
>>> plain = multihead.multi_head_attention_vjp(dy, x, wide, num_heads=1)
>>> dout = dy @ wide.w_o.T
>>> folded = multihead.folded_projection_vjp(dout, x, *wide[:3])
>>> print(np.allclose(folded, plain.dx))
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .attention import attention, attention_vjp, default_scale, scores_of
from .backward import delta as delta_of
from .softmax import score_gradient
from .tile_state import probabilities_from_lse

# inf and NaN give their usual results, without a warning.
quiet = np.errstate(over="ignore", invalid="ignore")

# ------------------------------------------------------- projections and heads


@quiet
def project(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return X W ([003], eq. 6).

    Parameters
    ----------
    x : ndarray, (..., seqlen, width)
    w : ndarray, (width, columns)

    Returns
    -------
    ndarray, (..., seqlen, columns)
    """
    return x @ w


@quiet
def project_vjp(
    dy: np.ndarray, x: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    r"""Pull a gradient back through a projection.

    .. math:: dX = dY W^T,\quad dW = X^T dY

    [003], appendix. All sequences share W, so dW is summed over the leading
    axes.

    Parameters
    ----------
    dy : ndarray, (..., seqlen, columns)
    x : ndarray, (..., seqlen, width)
    w : ndarray, (width, columns)

    Returns
    -------
    dx : ndarray, (..., seqlen, width)
    dw : ndarray, (width, columns)
    """
    all_x = x.reshape(-1, x.shape[-1])
    all_dy = dy.reshape(-1, dy.shape[-1])
    return dy @ w.T, all_x.T @ all_dy


def split_heads(y: np.ndarray, num_heads: int) -> np.ndarray:
    """Split the columns into heads.

    Parameters
    ----------
    y : ndarray, (..., seqlen, num_heads * columns)
    num_heads : int

    Returns
    -------
    ndarray, (..., num_heads, seqlen, columns)
    """
    columns = y.shape[-1] // num_heads
    heads = y.reshape(*y.shape[:-1], num_heads, columns)
    return np.swapaxes(heads, -2, -3)


def join_heads(heads: np.ndarray) -> np.ndarray:
    """Undo `split_heads`; [003] calls it Concat (eq. 3).

    Parameters
    ----------
    heads : ndarray, (..., num_heads, seqlen, columns)

    Returns
    -------
    ndarray, (..., seqlen, num_heads * columns)
    """
    num_heads, seqlen, columns = heads.shape[-3:]
    tokens = np.swapaxes(heads, -2, -3)
    return tokens.reshape(*heads.shape[:-3], seqlen, num_heads * columns)


def share_heads(heads: np.ndarray, group_size: int) -> np.ndarray:
    """Repeat every key head for each query head of its group.

    Parameters
    ----------
    heads : ndarray, (..., num_heads_kv, seqlen, columns)
    group_size : int

    Returns
    -------
    ndarray, (..., num_heads_kv * group_size, seqlen, columns)
        Head h is head h // group_size of the argument.
    """
    return np.repeat(heads, group_size, axis=-3)


@quiet
def share_heads_vjp(dheads: np.ndarray, group_size: int) -> np.ndarray:
    """Sum the gradients of each group's heads: the vjp of `share_heads`.

    Parameters
    ----------
    dheads : ndarray, (..., num_heads_kv * group_size, seqlen, columns)
    group_size : int

    Returns
    -------
    ndarray, (..., num_heads_kv, seqlen, columns)
    """
    *leading, num_heads, seqlen, columns = dheads.shape
    groups = (*leading, num_heads // group_size, group_size, seqlen, columns)
    return dheads.reshape(groups).sum(axis=-3)


# ------------------------------------------------------------------ the layer


class Weights(NamedTuple):
    """The four matrices of a layer, or their gradients.

    w_q (width, num_heads * head_dim), w_k (width, num_heads_kv * head_dim),
    w_v (width, num_heads_kv * head_dim_v), w_o (num_heads * head_dim_v,
    width_out).
    """

    w_q: np.ndarray
    w_k: np.ndarray
    w_v: np.ndarray
    w_o: np.ndarray


def heads_of(
    x: np.ndarray, weights: Weights, num_heads: int, num_heads_kv: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return Q, K and V for every query head ([003], eq. 6).

    Parameters
    ----------
    x : ndarray of float64, (..., seqlen, width)
    weights : Weights
    num_heads, num_heads_kv : int

    Returns
    -------
    q, k : ndarray, (..., num_heads, seqlen, head_dim)
    v : ndarray, (..., num_heads, seqlen, head_dim_v)
    """
    group_size = num_heads // num_heads_kv
    q = split_heads(project(x, weights.w_q), num_heads)
    k = split_heads(project(x, weights.w_k), num_heads_kv)
    v = split_heads(project(x, weights.w_v), num_heads_kv)
    return q, share_heads(k, group_size), share_heads(v, group_size)


def multi_head_attention(
    x: np.ndarray,
    weights: Weights,
    *,
    num_heads: int,
    num_heads_kv: int | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> np.ndarray:
    """Compute multi-head self-attention ([003], eq. 3, 4 and 6 to 10).

    Parameters
    ----------
    x : array_like, (..., seqlen, width)
    weights : Weights
    num_heads : int
    num_heads_kv : int, optional
        Default num_heads.
    scale : float, optional
        Default head_dim ** -0.5.
    causal : bool, optional

    Returns
    -------
    ndarray, (..., seqlen, width_out)
    """
    x, weights = _as_float64(x, weights)
    num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    q, k, v = heads_of(x, weights, num_heads, num_heads_kv)
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "heads_first": True,
    }
    out, _ = attention(q, k, v, **options)
    return project(join_heads(out), weights.w_o)


class LayerGradients(NamedTuple):
    """dX, of x's shape, and the gradients of the four matrices."""

    dx: np.ndarray
    dw_q: np.ndarray
    dw_k: np.ndarray
    dw_v: np.ndarray
    dw_o: np.ndarray


@quiet
def multi_head_attention_vjp(
    dy: np.ndarray,
    x: np.ndarray,
    weights: Weights,
    *,
    num_heads: int,
    num_heads_kv: int | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> LayerGradients:
    r"""Pull a gradient back through `multi_head_attention`.

    .. math::
        dW_O &= O^T dY,\quad dO = dY W_O^T \\
        dW_Q &= X^T dQ,\quad dW_K = X^T dK,\quad dW_V = X^T dV \\
        dX &= dQ W_Q^T + dK W_K^T + dV W_V^T

    [003], appendix, eq. 84; [000], "Through the QKV projections".

    Parameters
    ----------
    dy : array_like, (..., seqlen, width_out)
    x, weights, num_heads, num_heads_kv, scale, causal
        As in `multi_head_attention`.

    Returns
    -------
    LayerGradients
    """
    x, weights = _as_float64(x, weights)
    num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    group_size = num_heads // num_heads_kv
    q, k, v = heads_of(x, weights, num_heads, num_heads_kv)
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "heads_first": True,
    }
    out, _ = attention(q, k, v, **options)

    dy = np.asarray(dy, np.float64)
    dout, dw_o = project_vjp(dy, join_heads(out), weights.w_o)
    dout = split_heads(dout, num_heads)
    dq, dk, dv = attention_vjp(dout, q, k, v, **options)
    dk, dv = share_heads_vjp(dk, group_size), share_heads_vjp(dv, group_size)

    dx_q, dw_q = project_vjp(join_heads(dq), x, weights.w_q)
    dx_k, dw_k = project_vjp(join_heads(dk), x, weights.w_k)
    dx_v, dw_v = project_vjp(join_heads(dv), x, weights.w_v)
    return LayerGradients(dx_q + dx_k + dx_v, dw_q, dw_k, dw_v, dw_o)


# ------------------------------------------- without dQ, dK and dV in memory


class GradientRow(NamedTuple):
    """One token's row of dQ, dK or dV, the heads concatenated.

    Attributes
    ----------
    of : {"q", "k", "v"}
    token : int
        Index of the row.
    row : ndarray, (columns,)
    """

    of: str
    token: int
    row: np.ndarray


@quiet
def streamed_projection_vjp(
    rows: Iterable[GradientRow],
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    r"""Compute dX and dW from rows of dQ, dK and dV, without storing them.

    .. math::
        dX_i \mathrel{+}= dQ_i W_Q^T,\quad
        dW_Q \mathrel{+}= X_i^T dQ_i

    and likewise for K and V. [000], "Through the QKV projections": a row is
    added to dX and, as a rank-1 update, to dW, and then discarded. Both are
    sums, so rows may arrive in any order, and as several partial rows.

    Parameters
    ----------
    rows : iterable of GradientRow
        Each is consumed before the next is requested, so all may share one
        buffer.
    x : array_like, (seqlen, width)
    w_q, w_k, w_v : array_like, (width, columns)

    Returns
    -------
    dx : ndarray, (seqlen, width)
    dw_q, dw_k, dw_v : ndarray, (width, columns)
    """
    x = np.asarray(x, np.float64)
    w = {
        name: np.asarray(matrix, np.float64)
        for name, matrix in (("q", w_q), ("k", w_k), ("v", w_v))
    }
    dx = np.zeros(x.shape)
    dw = {name: np.zeros(matrix.shape) for name, matrix in w.items()}
    for of, token, row in rows:
        dx[token] += row @ w[of].T
        dw[of] += np.outer(x[token], row)
    return dx, dw["q"], dw["k"], dw["v"]


def gradient_rows(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    group_size: int = 1,
    scale: float | None = None,
    causal: bool = False,
) -> Iterator[GradientRow]:
    r"""Yield the rows of dQ, then those of dK and dV, one at a time.

    .. math::
        dQ_i = scale \sum_j dS_{ij} K_j,\quad
        dK_j = scale \sum_i dS_{ij} Q_i,\quad
        dV_j = \sum_i P_{ij} dO_i

    [000], "Execution schedule": row i of dS gives row i of dQ; column j of P
    and dS gives row j of dK and dV. lse and delta of each row make a column
    as easy to compute as a row.

    Parameters
    ----------
    dout : ndarray, (num_heads, seqlen, head_dim_v)
    q, k : ndarray, (num_heads, seqlen, head_dim)
    v : ndarray, (num_heads, seqlen, head_dim_v)
    group_size : int, optional
        Number of consecutive heads that share k and v; their dk and dv are
        summed.
    scale : float, optional
    causal : bool, optional

    Yields
    ------
    GradientRow
    """
    seqlen = q.shape[-2]
    scale = default_scale(q.shape[-1]) if scale is None else scale
    out, lse = attention(q, k, v, scale=scale, causal=causal, heads_first=True)
    delta = delta_of(dout, out)

    def weights(i: slice, j: slice) -> tuple[np.ndarray, np.ndarray]:
        s = scores_of(q[:, i], k[:, j], scale)
        p = probabilities_from_lse(s, lse[:, i])
        dp = dout[:, i] @ np.swapaxes(v[:, j], -1, -2)
        return p, score_gradient(p, dp, delta[:, i])

    def joined(heads: np.ndarray) -> np.ndarray:
        return join_heads(heads)[0]

    for token in range(seqlen):
        i = slice(token, token + 1)
        j = slice(0, token + 1) if causal else slice(0, seqlen)
        _, ds = weights(i, j)
        yield GradientRow("q", token, joined(scale * ds @ k[:, j]))

    for token in range(seqlen):
        i = slice(token, seqlen) if causal else slice(0, seqlen)
        j = slice(token, token + 1)
        p, ds = (np.swapaxes(x, -1, -2) for x in weights(i, j))
        dk = share_heads_vjp(scale * ds @ q[:, i], group_size)
        dv = share_heads_vjp(p @ dout[:, i], group_size)
        yield GradientRow("k", token, joined(dk))
        yield GradientRow("v", token, joined(dv))


@quiet
def folded_projection_vjp(
    dout: np.ndarray,
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> np.ndarray:
    r"""Compute dX of one head without dQ, dK and dV.

    .. math::
        dX = scale \cdot dS (K W_Q^T) + scale \cdot dS^T (Q W_K^T)
             + P^T (dO W_V^T)

    [000], "Through the QKV projections" and "Execution schedule": the
    projections are folded into the right operands first, and each row of dS
    and P is consumed at once. It completes its own row of the first term and
    is a rank-1 update of the other two. The dX of several heads add up.

    dW_Q = X^T dQ needs dQ, so that training prefers
    `streamed_projection_vjp`. The three products with dS and P have width
    columns instead of head_dim: for num_heads heads, num_heads times the
    operations of dQ, dK and dV (`roofline.folded_flops`).

    Parameters
    ----------
    dout : array_like, (seqlen, head_dim_v)
        Gradient with respect to the head's out.
    x : array_like, (seqlen, width)
    w_q, w_k : array_like, (width, head_dim)
    w_v : array_like, (width, head_dim_v)
    scale : float, optional
        Default head_dim ** -0.5.
    causal : bool, optional

    Returns
    -------
    ndarray, (seqlen, width)
    """
    dout, x, w_q, w_k, w_v = (
        np.asarray(array, np.float64) for array in (dout, x, w_q, w_k, w_v)
    )
    scale = default_scale(w_q.shape[-1]) if scale is None else scale
    q, k, v = project(x, w_q), project(x, w_k), project(x, w_v)
    out, lse = attention(q, k, v, scale=scale, causal=causal)
    delta = delta_of(dout, out)

    k_wq, q_wk, dout_wv = scale * k @ w_q.T, scale * q @ w_k.T, dout @ w_v.T
    dx = np.zeros(x.shape)
    for token in range(len(x)):
        i = slice(token, token + 1)
        j = slice(0, token + 1) if causal else slice(0, len(x))
        p = probabilities_from_lse(scores_of(q[i], k[j], scale), lse[i])
        ds = score_gradient(p, dout[i] @ v[j].T, delta[i])
        dx[i] += ds @ k_wq[j]
        dx[j] += ds.T @ q_wk[i]
        dx[j] += p.T @ dout_wv[i]
    return dx


def _as_float64(x: np.ndarray, weights: Weights) -> tuple[np.ndarray, Weights]:
    w = Weights(*(np.asarray(matrix, np.float64) for matrix in weights))
    return np.asarray(x, np.float64), w
