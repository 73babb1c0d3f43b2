"""Which query sees which key, for a pair, a tile and a product.

Every mask of the library is one question, "does query i see key j", asked
of a pair, of a tile (nothing, everything or a part of it is seen) and of a
sum (only seen pairs are added). The causal mask is aligned bottom right:
query i sees key j iff ``j <= i + seqlen_k - seqlen_q``, so that the last
query sees every key.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np


class Visibility(Enum):
    """What the queries of a tile see of its keys."""

    NONE = "none"
    PART = "part"
    ALL = "all"


def tiles(length: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut a sequence into tiles of `block` tokens; the last may be shorter.

    Yields
    ------
    start, stop : int
        Offsets in tokens.
    """
    if block < 1:
        raise ValueError(f"a tile has at least 1 token, not {block}")
    for start in range(0, length, block):
        yield start, min(start + block, length)


def visible(
    seqlen_q: int, seqlen_k: int, *, causal: bool = False
) -> np.ndarray:
    """Return the dense mask.

    Returns
    -------
    ndarray of bool, (seqlen_q, seqlen_k)
        True where query i sees key j.
    """
    return visible_tile(0, seqlen_q, 0, seqlen_k, seqlen_q, seqlen_k, causal)


def visible_tile(
    q_start: int,
    q_stop: int,
    k_start: int,
    k_stop: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
) -> np.ndarray:
    """Return one tile of the dense mask.

    Returns
    -------
    ndarray of bool, (q_stop - q_start, k_stop - k_start)
    """
    query = np.arange(q_start, q_stop)[:, None]
    key = np.arange(k_start, k_stop)[None, :]
    if causal:
        return key <= query + (seqlen_k - seqlen_q)
    return np.ones((query.size, key.size), dtype=bool)


def tile_visibility(
    q_start: int,
    q_stop: int,
    k_start: int,
    k_stop: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
) -> Visibility:
    """Answer for a tile, without its mask, what is visible in it.

    Under the causal mask the last query sees most and the first query
    least, so two comparisons decide.
    """
    if q_start >= q_stop or k_start >= k_stop:
        return Visibility.NONE
    if not causal:
        return Visibility.ALL
    shift = seqlen_k - seqlen_q
    if k_start > q_stop - 1 + shift:
        return Visibility.NONE
    if k_stop - 1 <= q_start + shift:
        return Visibility.ALL
    return Visibility.PART


def tile_mask(
    q_start: int,
    q_stop: int,
    k_start: int,
    k_stop: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
) -> np.ndarray | None:
    """Return the mask of a tile, or None where the tile needs no mask."""
    tile = (q_start, q_stop, k_start, k_stop, seqlen_q, seqlen_k, causal)
    if tile_visibility(*tile) is Visibility.ALL:
        return None
    return visible_tile(*tile)


def masked_product(
    weights: np.ndarray, values: np.ndarray, visible: np.ndarray | None = None
) -> np.ndarray:
    """Multiply matrices, adding the visible pairs only.

    ``out[i, c] = sum of weights[i, j] * values[j, c] over j visible to i``

    A zero weight is not enough to leave a pair out, because 0 * NaN and
    0 * inf are NaN. So NaN and inf are taken out of the plain product, and
    the visible pairs that hold one are added by themselves. What stands in
    an invisible place changes no bit of the result.

    Parameters
    ----------
    weights : ndarray, (..., rows, keys)
    values : ndarray, (..., keys, columns)
    visible : ndarray of bool, broadcastable to (..., rows, keys), optional
        Every pair is visible if it is None.

    Returns
    -------
    ndarray, (..., rows, columns)
    """
    if visible is not None:
        weights = np.where(visible, weights, 0.0)
    plain_weights, plain_values = np.isfinite(weights), np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore"):
        if plain_weights.all() and plain_values.all():
            return weights @ values
        product = np.where(plain_weights, weights, 0.0) @ np.where(
            plain_values, values, 0.0
        )
        for j in range(weights.shape[-1]):
            odd = ~(
                plain_weights[..., j, None] & plain_values[..., None, j, :]
            )
            if visible is not None:
                odd &= visible[..., j, None]
            if odd.any():
                term = weights[..., j, None] * values[..., None, j, :]
                product = product + np.where(odd, term, 0.0)
    return product
