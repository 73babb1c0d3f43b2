"""Which query sees which key, for a pair, a tile and a matmul.

Every mask answers one question, "does query i see key j", for a pair, for a
tile (nothing, all or a part of it is visible) and for a sum (only visible
pairs are added). The causal mask is aligned bottom right:
query i sees key j iff ``j <= i + seqlen_k - seqlen_q``, so that the last
query sees every key. A window ``(left, right)`` has the same alignment: query
i sees key j iff ``-left <= j - (i + seqlen_k - seqlen_q) <= right``, where
None means no bound ([M] Jiang et al. 2023, arXiv:2310.06825; [LF] Beltagy
et al. 2020, arXiv:2004.05150). With segment ids, a query sees only keys of
its own segment ([PK] Krell et al. 2021, arXiv:2107.02027).

Example
-------
Two more keys than queries: the masks are aligned at the last key. Rows are
queries, columns keys.

>>> import numpy as np
>>> from cuflash.reference import masks
>>> print(masks.visible(3, 5, causal=True).astype(int))
[[1 1 1 0 0]
 [1 1 1 1 0]
 [1 1 1 1 1]]
>>> print(masks.visible(3, 5, window=(1, 0)).astype(int))
[[0 1 1 0 0]
 [0 0 1 1 0]
 [0 0 0 1 1]]

A tile's mask is needed only where a part of it is visible:

>>> for k_start, k_stop in masks.tiles(6, 2):
...     tile = 2, 4, k_start, k_stop  # queries 2 and 3
...     print(tile, masks.tile_visibility(*tile, 6, 6, causal=True).value)
(2, 4, 0, 2) all
(2, 4, 2, 4) part
(2, 4, 4, 6) none

A masked NaN reaches no result:

>>> weights = np.array([[0.5, 0.5, 0.0]])
>>> values = np.array([[2.0], [4.0], [np.nan]])
>>> masks.masked_product(weights, values, np.array([True, True, False]))
array([[3.]])
>>> masks.masked_product(weights, values)
array([[nan]])
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np

Window = tuple[int | None, int | None]
UNBOUNDED: Window = (None, None)


class Visibility(Enum):
    """How many pairs of a tile are visible."""

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


def tile_slices(length: int, block: int) -> list[slice]:
    """Return the tiles of an axis as slices."""
    return [slice(*tile) for tile in tiles(length, block)]


def key_interval(
    query: np.ndarray | int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window: Window = UNBOUNDED,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys [first, end) that a query sees.

    Neither end decreases from one query to the next.

    Parameters
    ----------
    query : ndarray of int, or int
    seqlen_q, seqlen_k : int
    causal : bool, optional
        A right bound of 0, whatever the window.
    window : tuple of (int or None), optional
        (left, right), both inclusive; None for no bound.

    Returns
    -------
    first, end : ndarray of int
        Like query.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    middle = np.asarray(query) + (seqlen_k - seqlen_q)
    first = 0 * middle if left is None else middle - left
    end = 0 * middle + seqlen_k if right is None else middle + right + 1
    return np.clip(first, 0, seqlen_k), np.clip(end, 0, seqlen_k)


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: Window = UNBOUNDED,
) -> np.ndarray:
    """Return the dense mask.

    Returns
    -------
    ndarray of bool, (seqlen_q, seqlen_k)
        True where query i sees key j.
    """
    whole = (0, seqlen_q, 0, seqlen_k, seqlen_q, seqlen_k)
    return visible_tile(*whole, causal, window)


def visible_tile(
    q_start: int,
    q_stop: int,
    k_start: int,
    k_stop: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    window: Window = UNBOUNDED,
) -> np.ndarray:
    """Return one tile of the dense mask.

    Returns
    -------
    ndarray of bool, (q_stop - q_start, k_stop - k_start)
    """
    query = np.arange(q_start, q_stop)[:, None]
    key = np.arange(k_start, k_stop)[None, :]
    first, end = key_interval(query, seqlen_q, seqlen_k, causal, window)
    return (first <= key) & (key < end)


def tile_visibility(
    q_start: int,
    q_stop: int,
    k_start: int,
    k_stop: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    window: Window = UNBOUNDED,
) -> Visibility:
    """Return a tile's visibility without computing its mask.

    The union of the keys that its queries see is an interval: from the first
    query's first key to the last query's last key. The intersection is the
    interval from the last query's first key to the first query's last key.
    """
    if q_start >= q_stop or k_start >= k_stop:
        return Visibility.NONE
    bounds = (seqlen_q, seqlen_k, causal, window)
    some_from, all_to = key_interval(q_start, *bounds)
    all_from, some_to = key_interval(q_stop - 1, *bounds)
    if k_start >= some_to or k_stop <= some_from:
        return Visibility.NONE
    if k_start >= all_from and k_stop <= all_to:
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
    window: Window = UNBOUNDED,
) -> np.ndarray | None:
    """Return the mask of a tile, or None where the tile needs no mask."""
    tile = (q_start, q_stop, k_start, k_stop, seqlen_q, seqlen_k)
    if tile_visibility(*tile, causal, window) is Visibility.ALL:
        return None
    return visible_tile(*tile, causal, window)


def same_segment(ids_q: np.ndarray, ids_k: np.ndarray) -> np.ndarray:
    """Return which pairs belong to one segment.

    Parameters
    ----------
    ids_q : ndarray of int, (..., rows)
    ids_k : ndarray of int, (..., keys)

    Returns
    -------
    ndarray of bool, (..., rows, keys)
    """
    return ids_q[..., :, None] == ids_k[..., None, :]


def masked(array: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Return the array, with 0 where a pair is not visible."""
    return array if visible is None else np.where(visible, array, 0.0)


def masked_product(
    weights: np.ndarray, values: np.ndarray, visible: np.ndarray | None = None
) -> np.ndarray:
    """Multiply matrices, adding the visible pairs only.

    ``out[i, c] = sum of weights[i, j] * values[j, c] over j visible to i``

    A weight of 0 does not exclude a pair, because 0 * NaN and 0 * inf are
    NaN. So the matmul uses 0 for NaN and inf, and the terms of visible pairs
    that contain one are added afterwards. Values that no query sees change
    no bit of the result.

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
    weights = masked(weights, visible)
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
