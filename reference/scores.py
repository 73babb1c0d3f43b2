r"""Score modifications: from scale * QK^T to the mask.

.. math::
    s &\to cap \cdot \tanh(s / cap), \\
    s &\to s - slope_h |i + seqlen_k - seqlen_q - j|, \\
    s &\to s + bias_{ij}

in this order. The first is softcapping ([G2] Gemma Team 2024,
arXiv:2408.00118, section 2), the second ALiBi ([AL] Press et al. 2021,
arXiv:2108.12409, section 3). A sink is an additional logit of a row, without
a value ([SK] Xiao et al. 2023, arXiv:2309.17453; as a learned logit, OpenAI
2025, arXiv:2508.10925, section 2.2). The gradient of each follows it.

Example
-------
Each modification of one row of scores, and a sink, which takes weight from
the keys but has no value:

>>> import numpy as np
>>> from cuflash.reference import scores
>>> s = np.array([[-40.0, 0.0, 5.0, 40.0]])
>>> print(scores.softcap(s, 20.0).round(2))
[[-19.28   0.     4.9   19.28]]
>>> query, key = np.array([3]), np.arange(4)
>>> print(scores.alibi(np.array(0.5), query, key, shift=0) + 0.0)
[[-1.5 -1.  -0.5  0. ]]
>>> row = np.log([[1.0, 2.0, 1.0]])
>>> weights = np.exp(scores.with_sink(row, np.log(4.0)))
>>> print(weights / weights.sum())
[[0.125 0.25  0.125 0.5  ]]
"""

from __future__ import annotations

import numpy as np

quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")


@quiet
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
    return a @ np.swapaxes(b, -1, -2)


@quiet
def scores_of(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    visible: np.ndarray | None = None,
    largest: float | None = None,
) -> np.ndarray:
    r"""Return :math:`S = scale \cdot Q K^T`, -inf where not visible.

    [003], eq. 7. The matmul comes first, then the scale. Forward and backward
    both call this function: if scores are so large that their last bit
    matters in exp(S - lse) (magnitudes beyond 1e13 or so), both must round
    equally, and BLAS rounds equally only for tiles of the same shape.

    Parameters
    ----------
    q : ndarray, (..., rows, head_dim)
    k : ndarray, (..., keys, head_dim)
    scale : float
    visible : ndarray of bool, broadcastable to (..., rows, keys), optional
    largest : float, optional
        See `in_range`; applied to QK^T and to S.

    Returns
    -------
    ndarray, (..., rows, keys)
    """
    s = in_range(in_range(rows_with_rows(q, k), largest) * scale, largest)
    return s if visible is None else np.where(visible, s, -np.inf)


@quiet
def in_range(s: np.ndarray, largest: float | None) -> np.ndarray:
    """Return scores, infinite where their magnitude exceeds `largest`.

    This models an arithmetic whose largest number is `largest`.

    Parameters
    ----------
    s : ndarray
    largest : float or None
        None for float64's largest number: s is unchanged.
    """
    if largest is None:
        return s
    beyond = np.abs(s) > largest
    return np.where(beyond, np.copysign(np.inf, s), s) if beyond.any() else s


@quiet
def softcap(s: np.ndarray, cap: float) -> np.ndarray:
    r"""Return :math:`cap \tanh(s / cap)`, between -cap and cap.

    Parameters
    ----------
    s : ndarray
        Scaled scores.
    cap : float
        Above 0.
    """
    return cap * np.tanh(s / cap)


@quiet
def softcap_slope(capped: np.ndarray, cap: float) -> np.ndarray:
    r"""Return the derivative, :math:`1 - \tanh^2(s / cap)`.

    Parameters
    ----------
    capped : ndarray
        The result of `softcap`.
    cap : float
    """
    return 1.0 - (capped / cap) ** 2


@quiet
def softcap_curvature(capped: np.ndarray, cap: float) -> np.ndarray:
    r"""Return the second derivative, :math:`-2 t (1 - t^2) / cap`.

    Here t is tanh(s / cap).

    Parameters
    ----------
    capped : ndarray
        The result of `softcap`.
    cap : float
    """
    return -2.0 / cap * (capped / cap) * softcap_slope(capped, cap)


@quiet
def alibi(
    slopes: np.ndarray, query: np.ndarray, key: np.ndarray, shift: int
) -> np.ndarray:
    r"""Return :math:`-slope |i + shift - j|`.

    Parameters
    ----------
    slopes : ndarray, (...)
        One per head.
    query, key : ndarray of int, (rows,) and (keys,)
        Indices of tokens.
    shift : int
        seqlen_k - seqlen_q: aligns the last query with the last key.

    Returns
    -------
    ndarray, (..., rows, keys)
    """
    distance = abs(query[:, None] + shift - key[None, :])
    return -np.asarray(slopes)[..., None, None] * distance


@quiet
def reduce_to_shape(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of `shape` was broadcast.

    The gradient of broadcasting.

    Parameters
    ----------
    array : ndarray
    shape : tuple of int
        Broadcastable to array's.

    Returns
    -------
    ndarray
        Of that shape.
    """
    extra = array.ndim - len(shape)
    stretched = [
        extra + axis
        for axis, size in enumerate(shape)
        if size == 1 and array.shape[extra + axis] != 1
    ]
    summed = array.sum(axis=(*range(extra), *stretched))
    return summed.reshape(shape)


def with_sink(s: np.ndarray, sink: np.ndarray | None) -> np.ndarray:
    """Return scores with the sink as an additional, last column.

    Parameters
    ----------
    s : ndarray, (..., rows, keys)
    sink : ndarray, broadcastable to (...), or None

    Returns
    -------
    ndarray, (..., rows, keys + 1); or keys, without a sink
    """
    if sink is None:
        return s
    column = np.asarray(sink, np.float64)[..., None, None]
    column = np.broadcast_to(column, (*s.shape[:-1], 1))
    return np.concatenate([s, column], axis=-1)


@quiet
def sink_gradient(
    sink: np.ndarray, lse: np.ndarray, delta: np.ndarray
) -> np.ndarray:
    r"""Return :math:`-\sum_i e^{sink - lse_i} D_i`.

    The sink's weight in row i is exp(sink - lse_i) and its value 0, so that
    dS = P (dP - D) has dP = 0 there. A sink of -inf has no weight.

    Parameters
    ----------
    sink : ndarray, broadcastable to (...)
    lse, delta : ndarray, (..., seqlen_q)

    Returns
    -------
    ndarray, like sink
    """
    sink = np.asarray(sink, np.float64)
    p = np.exp(np.where(sink == -np.inf, np.nan, sink)[..., None] - lse)
    p = np.where((sink == -np.inf)[..., None], 0.0, p)
    rows = -(p * delta).sum(axis=-1)
    return reduce_to_shape(rows, sink.shape)
