r"""Rotary position embedding: queries and keys, rotated by their positions.

A token at position m rotates each pair (a, b) of its columns by an angle
:math:`m \theta_i`, i = 0, ..., rotary_dim / 2 - 1:

.. math::
    a' &= a \cos(m \theta_i) - b \sin(m \theta_i) \\
    b' &= a \sin(m \theta_i) + b \cos(m \theta_i)

so that :math:`q'_m \cdot k'_n` depends on q, k and m - n only ([RF] Su et
al. 2021, arXiv:2104.09864, section 3.2, eq. 13 to 16, 34). cos and sin are
tables, one row per position.

Example
-------
A score depends on the distance of its query and key, not on where they are:

>>> import numpy as np
>>> from cuflash.reference.rotary import apply_rotary, tables
>>> cos, sin = tables(num_positions=100, rotary_dim=8)
>>> q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 8))
>>> for m, n in ((3, 1), (42, 40), (42, 41)):
...     a = apply_rotary(q, cos, sin, [m])
...     b = apply_rotary(k, cos, sin, [n])
...     print(f"distance {m - n}: {(a * b).sum():.6f}")
distance 2: -3.619648
distance 2: -3.619648
distance 1: -2.514775
"""

from __future__ import annotations

import numpy as np


def tables(
    num_positions: int, rotary_dim: int, base: float = 10000.0
) -> tuple[np.ndarray, np.ndarray]:
    r"""Return cos and sin of :math:`m \theta_i`.

    :math:`\theta_i = base^{-2 i / rotary\_dim}` ([RF], section 3.2.2).

    Returns
    -------
    cos, sin : ndarray, (num_positions, rotary_dim / 2)
    """
    theta = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(num_positions)[:, None] * theta
    return np.cos(angles), np.sin(angles)


def pairs(rotary_dim: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the columns of the first and of the second element of pairs.

    Pair i is (2i, 2i + 1) if interleaved, else (i, i + rotary_dim / 2).
    """
    if interleaved:
        return slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    half = rotary_dim // 2
    return slice(0, half), slice(half, rotary_dim)


@np.errstate(over="ignore", invalid="ignore")
def apply_rotary(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    interleaved: bool = False,
    inverse: bool = False,
) -> np.ndarray:
    r"""Rotate the pairs of each token's columns by the token's position.

    Columns from rotary_dim on are returned unchanged. The inverse rotates by
    :math:`-m \theta_i`. A rotation is orthogonal, so its inverse is its
    transpose and therefore its gradient with respect to x.

    Parameters
    ----------
    x : array_like, (batch, seqlen, heads, head_dim)
        Or packed, (tokens, heads, head_dim).
    cos, sin : array_like, (num_positions, rotary_dim / 2)
        rotary_dim is at most head_dim.
    positions : array_like of int, (batch, seqlen)
        Or (tokens,), or broadcastable; 0 to num_positions - 1.
    interleaved : bool, optional
        See `pairs`.
    inverse : bool, optional

    Returns
    -------
    ndarray of float64, like x
    """
    x, cos, sin = (np.asarray(array, np.float64) for array in (x, cos, sin))
    positions = np.broadcast_to(positions, x.shape[:-2])
    c, s = cos[positions][..., None, :], sin[positions][..., None, :]
    if inverse:
        s = -s
    first, second = pairs(2 * cos.shape[-1], interleaved)
    a, b = x[..., first], x[..., second]
    rotated = x.copy()
    rotated[..., first] = a * c - b * s
    rotated[..., second] = a * s + b * c
    return rotated
