r"""Attention and its gradient with every matrix materialised.

.. math:: S = scale \cdot Q K^T,\quad P = softmax(S),\quad O = P V

S, P, dP and dS are whole (seqlen_q, seqlen_k) matrices. Every other algorithm
of this package is compared with these functions. `options.Options` lists the
options. Sources: [002], [003], [FA] Dao et al. 2022, arXiv:2205.14135,
Algorithm 0.

Example
-------
The example that [002] works by hand, with scale 1: rows of P are weights that
add up to 1, and every row of dS adds up to 0.

>>> import numpy as np
>>> from cuflash.reference.attention import attention, gradient_steps
>>> q = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
>>> k = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
>>> v = np.arange(1, 17).reshape(4, 4)
>>> out, lse = attention(q, k, v, scale=1)
>>> print(out.round(3))
[[ 7.204  8.204  9.204 10.204]
 [ 9.882 10.882 11.882 12.882]
 [ 6.076  7.076  8.076  9.076]
 [ 7.924  8.924  9.924 10.924]]
>>> dout = np.array([[1], [0], [1], [0]]) * np.ones(4)
>>> print(gradient_steps(dout, q, k, v, scale=1))
p
[[0.225 0.083 0.61  0.083]
 [0.083 0.225 0.083 0.61 ]
 [0.366 0.134 0.366 0.134]
 [0.134 0.366 0.134 0.366]]
dv
[[0.59  0.59  0.59  0.59 ]
 [0.217 0.217 0.217 0.217]
 [0.976 0.976 0.976 0.976]
 [0.217 0.217 0.217 0.217]]
dp
[[10. 26. 42. 58.]
 [ 0.  0.  0.  0.]
 [10. 26. 42. 58.]
 [ 0.  0.  0.  0.]]
delta
[34.816  0.    30.303  0.   ]
ds_bias
[[-5.571 -0.728  4.385  1.915]
 [ 0.     0.     0.     0.   ]
 [-7.421 -0.579  4.276  3.724]
 [ 0.     0.     0.     0.   ]]
ds
[[-5.571 -0.728  4.385  1.915]
 [ 0.     0.     0.     0.   ]
 [-7.421 -0.579  4.276  3.724]
 [ 0.     0.     0.     0.   ]]
dq
[[-1.187  1.187  4.385  1.915]
 [ 0.     0.     0.     0.   ]
 [-3.146  3.146  4.276  3.724]
 [ 0.     0.     0.     0.   ]]
dk
[[-12.993   0.     -5.571   0.   ]
 [ -1.307   0.     -0.728   0.   ]
 [  8.66    0.      4.385   0.   ]
 [  5.639   0.      1.915   0.   ]]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .expressions import add_gradients
from .masks import masked, masked_product
from .options import Options, Tiles
from .scores import (
    reduce_to_shape,
    rows_with_rows,
    scores_of,
    with_sink,
)
from .softmax import (
    exp_shifted,
    row_max,
    safe_softmax,
    score_gradient,
    weighted_sum,
)
from .tile_state import logsumexp_of

__all__ = [
    "GradientSteps",
    "attention",
    "attention_vjp",
    "default_scale",
    "gradient_steps",
    "rows_with_rows",
    "scores_of",
]


def default_scale(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim) ([003], eq. 1)."""
    return head_dim**-0.5


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention by its definition ([003], eq. 7 to 9).

    Parameters
    ----------
    q : array_like, (..., seqlen_q, head_dim)
    k : array_like, (..., seqlen_k, head_dim)
    v : array_like, (..., seqlen_k, head_dim_v)
        The same leading axes in all three.
    scale : float, optional
        Default head_dim ** -0.5.
    **options
        Fields of `options.Options`, such as causal.

    Returns
    -------
    out : ndarray of float64, (..., seqlen_q, head_dim_v)
    lse : ndarray of float64, (..., seqlen_q)
    """
    q, k, v, tiles = _prepare(q, k, v, scale, options)
    whole = tiles.whole()
    scores = tiles.scores(q, k, whole)
    s, visible = scores.s, scores.visible
    s = with_sink(s, tiles.options.sink)
    m = row_max(s)
    l = exp_shifted(s, m).sum(axis=-1)  # noqa: E741
    lse = logsumexp_of(m, l)
    p = safe_softmax(s)[..., : tiles.seqlen_k]
    return masked_product(tiles.dropped(p, whole), v, visible), lse


def _prepare(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float | None,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tiles]:
    """Convert to float64; collect the options."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    seqlens = q.shape[-2], k.shape[-2]
    together = Options.of(q, options)
    return q, k, v, Tiles(*seqlens, scale, together)


class GradientSteps(NamedTuple):
    """Every quantity of the backward pass, in the order of computation.

    p, dp, ds_bias and ds are (..., seqlen_q, seqlen_k), delta is
    (..., seqlen_q), dq, dk and dv have the shapes of q, k and v. ds is the
    gradient of scale * QK^T, ds_bias that of the scores to which a bias is
    added: they differ by the slope of a softcap. dbias has the shape of bias,
    dsink that of sink; each is None without it. dmod has the gradients of
    return_dmod; None without names there.
    """

    p: np.ndarray
    dv: np.ndarray
    dp: np.ndarray
    delta: np.ndarray
    ds_bias: np.ndarray
    ds: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dbias: np.ndarray | None
    dsink: np.ndarray | None
    dmod: dict[str, np.ndarray] | None

    def __str__(self) -> str:
        names = (name for name, x in self._asdict().items() if x is not None)
        return "\n".join(
            f"{name}\n{np.round(getattr(self, name), 3)}" for name in names
        )


@np.errstate(over="ignore", invalid="ignore")
def gradient_steps(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> GradientSteps:
    r"""Compute the gradients of attention and all intermediate quantities.

    .. math::
        dV &= (Z \circ P)^T dO \\
        dP &= Z \circ (dO V^T) \\
        D_i &= \sum_j P_{ij} dP_{ij} - dlse_i \\
        dS_{ij} &= P_{ij} (dP_{ij} - D_i) \\
        dQ &= scale \cdot dS K \\
        dK &= scale \cdot dS^T Q

    These dS are the softmax's; a softcap and a score_mod multiply them by
    their slopes on the way to Q and K.
    [002], "Gradient formulas"; [003], "Summary of backward calculation".
    Z is 1 without dropout. dlse, the gradient with respect to lse, is 0 there:
    d lse_i / d S_ij = P_ij adds P_ij dlse_i to dS. Sums include all visible
    pairs, even where P is 0, and no others.

    Parameters
    ----------
    dout : array_like, (..., seqlen_q, head_dim_v)
        Gradient with respect to out.
    q, k, v, scale, **options
        As in `attention`.
    dlse : array_like, (..., seqlen_q), optional
        Gradient with respect to lse; 0 by default.

    Returns
    -------
    GradientSteps
    """
    q, k, v, tiles = _prepare(q, k, v, scale, options)
    dout, scale = np.asarray(dout, np.float64), tiles.scale
    bias, sink = tiles.options.bias, tiles.options.sink
    whole = tiles.whole()
    scores = tiles.scores(q, k, whole)
    s, visible = scores.s, scores.visible
    visible_t = None if visible is None else np.swapaxes(visible, -1, -2)

    weights = safe_softmax(with_sink(s, sink))
    p, p_sink = np.split(weights, [tiles.seqlen_k], axis=-1)
    p = masked(p, visible)
    kept = tiles.dropped(p, whole)
    dv = masked_product(np.swapaxes(kept, -1, -2), dout, visible_t)
    dp = tiles.dropped(rows_with_rows(dout, v), whole)
    delta = weighted_sum(p, dp, visible)
    if dlse is not None:
        delta = delta - np.asarray(dlse, np.float64)
    ds_softmax = score_gradient(p, dp, delta, visible)
    ds_bias = masked(ds_softmax * scores.slope_bias, visible)
    ds = masked(ds_softmax * scores.slope, visible)
    dq = scale * masked_product(ds, k, visible)
    dk = scale * masked_product(np.swapaxes(ds, -1, -2), q, visible_t)
    dbias = dsink = dmod = None
    if bias is not None:
        dbias = reduce_to_shape(ds_bias, np.shape(bias))
    if sink is not None:  # P (0 - D): a sink's value is 0
        dsink = -(p_sink[..., 0] * delta).sum(axis=-1)
        dsink = reduce_to_shape(dsink, np.shape(sink))
    if tiles.options.return_dmod:
        dmod = tiles.options.zeros_of_mod()
        add_gradients(dmod, scores.gathers, ds_softmax, visible)
    return GradientSteps(
        p, dv, dp, delta, ds_bias, ds, dq, dk, dbias, dsink, dmod
    )


def attention_vjp(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Return the gradients of `gradient_steps`.

    Parameters
    ----------
    dout, q, k, v, scale, dlse, **options
        As in `gradient_steps`.

    Returns
    -------
    dq, dk, dv : ndarray of float64
        With the shapes of q, k and v; then dbias if there is a bias, dsink
        if there is a sink, and dmod, a dict, if return_dmod names arrays.
    """
    steps = gradient_steps(dout, q, k, v, scale=scale, dlse=dlse, **options)
    maybe: tuple[Any, ...] = steps.dbias, steps.dsink, steps.dmod
    others = [x for x in maybe if x is not None]
    return steps.dq, steps.dk, steps.dv, *others
