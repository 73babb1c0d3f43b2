r"""Attention and its gradient with every matrix in the open.

.. math:: S = scale \cdot Q K^T,\quad P = softmax(S),\quad O = P V

Nothing here is saved: S, P, dP and dS are whole (seqlen_q, seqlen_k)
matrices. Every other algorithm of this package is measured against these
functions. Sources: [002], [003], [FA] Dao et al. 2022, arXiv:2205.14135,
Algorithm 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import masks
from .softmax import (
    exp_shifted,
    row_max,
    safe_softmax,
    score_gradient,
    weighted_sum,
)
from .tile_state import logsumexp_of


def default_scale(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim) ([003], eq. 1)."""
    return head_dim**-0.5


def rows_with_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A B^T: every row of a times every row of b.

    Parameters
    ----------
    a : ndarray, (..., rows, columns)
    b : ndarray, (..., keys, columns)

    Returns
    -------
    ndarray, (..., rows, keys)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return a @ np.swapaxes(b, -1, -2)


def scores_of(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    visible: np.ndarray | None = None,
) -> np.ndarray:
    r"""Return :math:`S = scale \cdot Q K^T`, -inf where not visible.

    [003], eq. 7. The product comes first and is scaled after. Forward and
    backward both call this function: where scores are so large that their
    last bit counts in exp(S - lse) (|S| beyond 1e13 or so), both must round
    it alike, and BLAS rounds alike only for tiles of the same shape.

    Parameters
    ----------
    q : ndarray, (..., rows, head_dim)
    k : ndarray, (..., keys, head_dim)
    scale : float
    visible : ndarray of bool, (rows, keys), optional

    Returns
    -------
    ndarray, (..., rows, keys)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        s = rows_with_rows(q, k) * scale
    return s if visible is None else np.where(visible, s, -np.inf)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention by its definition ([003], eq. 7 to 9).

    Parameters
    ----------
    q : array_like, (..., seqlen_q, head_dim)
    k : array_like, (..., seqlen_k, head_dim)
    v : array_like, (..., seqlen_k, head_dim_v)
        Leading axes alike in all three.
    scale : float, optional
        Default head_dim ** -0.5.
    causal : bool, optional
        Aligned bottom right; see `masks`.

    Returns
    -------
    out : ndarray of float64, (..., seqlen_q, head_dim_v)
    lse : ndarray of float64, (..., seqlen_q)
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    visible = masks.visible(q.shape[-2], k.shape[-2], causal=causal)
    s = scores_of(q, k, scale, visible)
    m = row_max(s)
    l = exp_shifted(s, m).sum(axis=-1)  # noqa: E741
    lse = logsumexp_of(m, l)
    out = masks.masked_product(safe_softmax(s), v, visible)
    return out, lse


class GradientSteps(NamedTuple):
    """Every quantity of the backward pass, in the order of its making.

    p, dp and ds are (..., seqlen_q, seqlen_k), delta is (..., seqlen_q),
    dq, dk and dv are like q, k and v.
    """

    p: np.ndarray
    dv: np.ndarray
    dp: np.ndarray
    delta: np.ndarray
    ds: np.ndarray
    dq: np.ndarray
    dk: np.ndarray


@np.errstate(over="ignore", invalid="ignore")
def gradient_steps(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> GradientSteps:
    r"""Compute the gradients of attention and all that leads to them.

    .. math::
        dV &= P^T dO \\
        dP &= dO V^T \\
        D_i &= \sum_j P_{ij} dP_{ij} \\
        dS_{ij} &= P_{ij} (dP_{ij} - D_i) \\
        dQ &= scale \cdot dS K \\
        dK &= scale \cdot dS^T Q

    [002], "Gradient formulas"; [003], "Summary of backward calculation".
    Pairs that are not visible are no part of any sum; those that are stay
    so where P is 0.

    Parameters
    ----------
    dout : array_like, (..., seqlen_q, head_dim_v)
        Gradient with respect to out.
    q, k, v, scale, causal
        As in `attention`.

    Returns
    -------
    GradientSteps
    """
    dout, q, k, v = (np.asarray(x, np.float64) for x in (dout, q, k, v))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    visible = masks.visible(q.shape[-2], k.shape[-2], causal=causal)
    s = scores_of(q, k, scale, visible)
    seen_by = np.swapaxes(visible, -1, -2)

    p = np.where(visible, safe_softmax(s), 0.0)
    dv = masks.masked_product(np.swapaxes(p, -1, -2), dout, seen_by)
    dp = rows_with_rows(dout, v)
    delta = weighted_sum(p, dp, visible)
    ds = score_gradient(p, dp, delta, visible)
    dq = scale * masks.masked_product(ds, k, visible)
    dk = scale * masks.masked_product(np.swapaxes(ds, -1, -2), q, seen_by)
    return GradientSteps(p, dv, dp, delta, ds, dq, dk)


def attention_vjp(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (dq, dk, dv), the last of `gradient_steps`.

    Parameters
    ----------
    dout, q, k, v, scale, causal
        As in `gradient_steps`.

    Returns
    -------
    dq, dk, dv : ndarray of float64
        Of the shapes of q, k and v.
    """
    steps = gradient_steps(dout, q, k, v, scale=scale, causal=causal)
    return steps.dq, steps.dk, steps.dv
