r"""Softmax in three passes, in two passes, and its gradient.

Sources: [000], [003], [MG] Milakov and Gimelshein 2018, arXiv:1805.02867.

Four rules hold here and in every other module. A score of -inf has weight 0,
even if all scores of its row are -inf (where the formula gives 0 / 0). A
score of inf makes every weight of its row NaN, and lse inf. The maximum
ignores NaN, but the exponential of a NaN score makes the sum, and so the row,
NaN. Only the mask decides which pairs a sum includes: a visible pair with
weight 0 is included, and 0 * inf and 0 * NaN are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def row_max(scores: np.ndarray) -> np.ndarray:
    """Return the largest score of every row, ignoring NaN; -inf if none.

    Parameters
    ----------
    scores : ndarray, (..., keys)

    Returns
    -------
    ndarray, (...)
    """
    return np.fmax.reduce(scores, axis=-1, initial=-np.inf)


def shift_of(m: np.ndarray) -> np.ndarray:
    """Return the number to subtract for a row maximum m: m, or 0 for -inf.

    -inf - (-inf) would be NaN; -inf - 0 has the right exponential, 0.
    """
    return np.where(m == -np.inf, 0.0, m)


def exp_shifted(scores: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Return exp(scores - m): at most 1, exactly 1 at the maximum.

    Parameters
    ----------
    scores : ndarray, (..., keys)
    m : ndarray, (...)
        Their row maximum, or a larger number.

    Returns
    -------
    ndarray, (..., keys)
    """
    # -1e308 - 1e308 is -inf, whose exponential is right; inf - inf is NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(scores - shift_of(m)[..., None])


def normalise(weights: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Divide every row by its total, or by 1 if the total is 0.

    A total of 0 means that all weights of the row are 0: there is no key, or
    all scores are -inf. Their weighted sum is 0, or NaN if a value is inf or
    NaN, and remains so.

    Parameters
    ----------
    weights : ndarray, (..., columns)
    total : ndarray, (...)

    Returns
    -------
    ndarray, (..., columns)
    """
    divisor = np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(invalid="ignore"):
        return weights / divisor


def safe_softmax(scores: np.ndarray) -> np.ndarray:
    r"""Softmax in three passes over each row.

    .. math:: P_j = e^{x_j - m} / \sum_k e^{x_k - m},\quad m = \max_k x_k

    [000], "Safe softmax"; [003], eq. 2.

    Parameters
    ----------
    scores : ndarray, (..., keys)

    Returns
    -------
    ndarray, (..., keys)
    """
    scores = np.asarray(scores, np.float64)
    m = row_max(scores)
    total = exp_shifted(scores, m).sum(axis=-1)
    return normalise(exp_shifted(scores, m), total)


def online_states(
    scores: np.ndarray,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    r"""Yield the running state (m_k, s_k) along each row.

    .. math::
        m_k &= \max(m_{k-1}, x_{k-1}) \\
        s_k &= s_{k-1} e^{m_{k-1} - m_k} + e^{x_{k-1} - m_k}

    [000], "Two paths to the same sum", path 2; [MG], Algorithm 3.

    Parameters
    ----------
    scores : ndarray, (..., keys)

    Yields
    ------
    m, s : ndarray, (...)
        After 0, 1, ..., keys elements: keys + 1 states. The first is
        (-inf, 0).
    """
    scores = np.asarray(scores, np.float64)
    m = np.full(scores.shape[:-1], -np.inf)
    s = np.zeros(scores.shape[:-1])
    yield m, s
    for k in range(scores.shape[-1]):
        x = scores[..., k]
        m_old, m = m, np.fmax(m, x)
        with np.errstate(over="ignore", invalid="ignore"):
            s = s * np.exp(m_old - shift_of(m)) + np.exp(x - shift_of(m))
        yield m, s


def online_softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax in two passes: the running state, then the division.

    [000], "Online softmax with four registers"; [MG], Algorithm 3.

    Parameters
    ----------
    scores : ndarray, (..., keys)

    Returns
    -------
    ndarray, (..., keys)
    """
    scores = np.asarray(scores, np.float64)
    *_, (m, s) = online_states(scores)
    return normalise(exp_shifted(scores, m), s)


def softmax_vjp(
    dp: np.ndarray, p: np.ndarray, visible: np.ndarray | None = None
) -> np.ndarray:
    r"""Return the vector-Jacobian product of the softmax.

    .. math:: dS_{ij} = P_{ij} (dP_{ij} - \sum_k P_{ik} dP_{ik})

    [003], eq. 21.

    Parameters
    ----------
    dp : ndarray, (..., keys)
        Gradient with respect to the weights.
    p : ndarray, (..., keys)
        The weights that softmax returned.
    visible : ndarray of bool, broadcastable to (..., keys), optional
        The pairs that exist. dS is 0 elsewhere, whatever dP is there.

    Returns
    -------
    ndarray, (..., keys)
    """
    return score_gradient(p, dp, weighted_sum(p, dp, visible), visible)


def weighted_sum(
    p: np.ndarray, dp: np.ndarray, visible: np.ndarray | None = None
) -> np.ndarray:
    r"""Return :math:`D_i = \sum_j P_{ij} dP_{ij}` ([003], eq. 22).

    Parameters
    ----------
    p, dp : ndarray, (..., keys)
    visible : ndarray of bool, broadcastable to (..., keys), optional

    Returns
    -------
    ndarray, (...)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.multiply(p, dp)
        if visible is not None:
            terms = np.where(visible, terms, 0.0)
        return terms.sum(axis=-1)


def score_gradient(
    p: np.ndarray,
    dp: np.ndarray,
    delta: np.ndarray,
    visible: np.ndarray | None = None,
) -> np.ndarray:
    r"""Return :math:`dS_{ij} = P_{ij} (dP_{ij} - D_i)` ([003], eq. 21).

    Parameters
    ----------
    p, dp : ndarray, (..., keys)
    delta : ndarray, (...)
        D_i, from `weighted_sum` or from rowsum(dO * O); less dlse_i, the
        gradient of lse, if there is one.
    visible : ndarray of bool, broadcastable to (..., keys), optional

    Returns
    -------
    ndarray, (..., keys)
        0 where a pair is not visible.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        ds = p * (dp - np.asarray(delta)[..., None])
    return ds if visible is None else np.where(visible, ds, 0.0)
