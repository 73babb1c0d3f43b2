r"""What the rounding of lse takes from P, and how P gets it back.

lse = m + log(l) is rounded to float64. In P = exp(S - lse) that is a relative
error of up to abs(lse) 2^-53 in all weights of a row: 1e-12 at 2^12, and
where a bias has added -1e18 to a row, log(l) is lost and every weight of the
largest score is 1. The differences S - lse and m - lse are exact there, so

.. math::
    rest &= (m - lse) + \log l \\
    P &= e^{S - lse} e^{-rest}

Example
-------
Four equal scores, masked by a large number:

>>> import numpy as np
>>> from cuflash.reference.lse_rest import lse_rests
>>> from cuflash.reference.options import Options, Tiles
>>> q, k, bias = np.zeros((1, 2)), np.zeros((4, 2)), np.full((1, 4), -1e18)
>>> pairs = Tiles(1, 4, 1.0, Options(bias=bias))
>>> lse = np.array([-1e18])  # and log 4
>>> rest = lse_rests(lse, q, k, pairs)
>>> print(np.exp(bias - lse), np.exp(bias - lse - rest))
[[1. 1. 1. 1.]] [[0.25 0.25 0.25 0.25]]
"""

from __future__ import annotations

import numpy as np

from .forward import state_of_rows
from .masks import tiles
from .options import Tiles

# The rounding of a smaller one changes P by less than 2^12 u, u = 2^-53: what
# a sum of 4,096 weights may lose.
LARGEST_ROUNDED_LSE = 2.0**12


def lse_rests(
    lse: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    pairs: Tiles,
    block_q: int = 64,
    block_k: int = 64,
) -> np.ndarray:
    """Return the rest of each row: 0 where the rounding of lse is small.

    It is 0, too, where the keys do not reproduce lse, which then covers more
    keys than these: up to the rounding, and up to 1/2 for what scores of
    another order of summation may have lost.

    Parameters
    ----------
    lse : ndarray of float64, (..., seqlen_q)
    q, k : ndarray of float64, (..., seqlen_q or seqlen_k, head_dim)
    pairs : Tiles
    block_q, block_k : int, optional
        The tiles in which the caller computes scores: BLAS rounds them
        equally only in tiles of the same shape.

    Returns
    -------
    ndarray of float64, (..., seqlen_q)
    """
    rests = np.zeros(lse.shape)
    large = np.isfinite(lse) & (np.abs(lse) > LARGEST_ROUNDED_LSE)
    for start, stop in tiles(pairs.seqlen_q, block_q):
        rows = (..., slice(start, stop))
        if not large[rows].any():
            continue
        state = state_of_rows(q, k, k[..., :0], pairs, rows[1], block_k)
        with np.errstate(all="ignore"):
            log = np.log(state.l)
            slack = np.minimum(4 * 2.0**-53 * np.abs(lse[rows]), 0.5)
            own = state.m + (log - slack) <= lse[rows]
            own &= lse[rows] <= state.m + (log + slack)
            rest = (state.m - lse[rows]) + log
        rests[rows] = np.where(large[rows] & own, rest, 0)
    return rests
