"""Scores of tiles of NumPy arrays, in their own precision, and their slopes.

Arrays have three axes of heads, (batch, num_heads_kv, group_size, seqlen, d);
k has a group of 1, which all query heads of the group read. A step takes one
tile of one head, or of as many heads as have `PAIRS` pairs together, because
each call of NumPy costs a microsecond. The heads of a step share no rounding:
BLAS multiplies each alone, so no bit depends on the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.backends.numpy.expressions import Expressions, Slopes
from cuflash.reference.masks import tiles as cut
from cuflash.reference.options import Options, Tile, Tiles

BLOCK_Q, BLOCK_K = 256, 512
PAIRS = BLOCK_Q * BLOCK_K  # of a step: 512 KiB of scores in float32

Heads = tuple[slice, slice, slice]


def steps(
    q: np.ndarray,
    k: np.ndarray,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
    **options: Any,
) -> Iterator[tuple[Scores, list[slice]]]:
    """Return the scores of some heads after the other, and tiles of queries.

    options : the other arguments of `Scores`.
    """
    block_q, block_k = block_q or BLOCK_Q, block_k or BLOCK_K
    tiles = [slice(*x) for x in cut(q.shape[-2], block_q)]
    for heads in heads_of_steps(q, k, block_q, block_k):
        yield Scores(heads, q, k, block_k=block_k, **options), tiles


def heads_of_steps(
    q: np.ndarray,
    k: np.ndarray,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
) -> Iterator[Heads]:
    """Cut the heads so that a tile of a part has about `PAIRS` pairs.

    The lengths alone decide how many of a group there are together, since
    their sum in dk is rounded.
    """
    batch, heads_kv, group = q.shape[:3]
    rows, keys = min(q.shape[-2], block_q), min(k.shape[-2], block_k)
    in_group = max(1, min(group, PAIRS // max(rows * keys, 1)))
    groups = max(1, PAIRS // max(rows * keys * in_group, 1))
    in_heads = max(1, min(heads_kv, groups))
    in_batch = max(1, groups // in_heads)
    for b in cut(batch, in_batch):
        for h in cut(heads_kv, in_heads):
            for g in cut(group, in_group):
                yield slice(*b), slice(*h), slice(*g)


def of_heads(array: np.ndarray, heads: Heads) -> np.ndarray:
    """The part of some heads, of an array with three axes of heads or more."""
    sizes = np.shape(array)[:3]
    return array[
        tuple(
            h if n > 1 else slice(None)
            for h, n in zip(heads, sizes, strict=True)
        )
    ]


def options_of(options: dict[str, Any], heads: Heads) -> dict[str, Any]:
    """The options of some heads."""

    def own(x: Any) -> Any:
        return of_heads(x, heads) if np.ndim(x) >= 3 else x

    return {
        name: type(x)(*map(own, x)) if name in _OF_HEADS else own(x)
        for name, x in options.items()
    }


_OF_HEADS = "dropout", "head_indices"  # tuples of what heads have


class Cap:
    """A softcap at a tile's scores: its derivatives.

    bends : whether `bend` is needed, else the slope takes the place of tanh:
        one array less, which is faster than half a tile's sums.
    """

    def __init__(self, tanh: np.ndarray, softcap: float, bends: bool) -> None:
        self.tanh, self.softcap, self.bends = tanh, softcap, bends

    @functools.cached_property
    def slope(self) -> np.ndarray:
        """The slope g with respect to scale * QK^T."""
        out = None if self.bends else self.tanh
        squares = np.multiply(self.tanh, self.tanh, out=out)
        return np.subtract(1, squares, out=squares)

    def bend(
        self, ds: np.ndarray, t: np.ndarray, x_dot: np.ndarray | None
    ) -> None:
        """Make T and dS g T + g' dS X' and g dS, in place; X' None is 0."""
        ds *= self.slope
        t *= self.slope
        if x_dot is not None:  # g' is -2 t g / cap
            t -= (2 / self.softcap) * self.tanh * ds * x_dot


class Scores:
    """Scores of the tiles of some heads.

    options : those of `arrays.options`.
    """

    def __init__(
        self,
        heads: Heads,
        q: np.ndarray,
        k: np.ndarray,
        *,
        scale: float,
        block_k: int,
        **options: Any,
    ) -> None:
        self.heads, self.block_k = heads, block_k
        self.q, self.k = q[heads], of_heads(k, heads)
        self.k_transposed = transposed(self.k)
        # Scaling by a power of two is exact, so q may have it.
        exact = abs(math.frexp(scale)[0]) == 0.5
        self.scaled_q = self.q * scale if exact else self.q
        self.scale = 1.0 if exact else scale
        self.options = Options(**options_of(options, heads))
        self.expressions = None
        if not (self.options.score_mod is self.options.mask_mod is None):
            lengths = q.shape[-2], k.shape[-2]
            self.expressions = Expressions(self.options, *lengths, q.dtype)
            self.options = replace(self.options, score_mod=None, mask_mod=None)
        self.masked = self.options.causal or any(
            x is not None
            for x in (
                *self.options.window,
                self.options.segment_ids_q,
                self.options.mask,
            )
        )
        self.pairs = Tiles(q.shape[-2], k.shape[-2], scale, self.options)

    def tiles(self, rows: slice) -> Iterator[tuple[Tile, np.ndarray | None]]:
        """The tiles of some queries, with the mask of those that need one."""
        first, end = self._seen(rows)
        for start, stop, tested in self._runs(rows, first, end):
            tile = Tile(rows.start, rows.stop, start, stop)
            visible = self.pairs.visible(tile) if self.masked else None
            if tested and self.expressions is not None:
                own = self.expressions.visible(tile)
                visible = own if visible is None else visible & own
            if visible is None or visible.any():
                yield tile, visible

    def tiles_of_options(
        self, rows: slice
    ) -> Iterator[tuple[Tile, np.ndarray | None]]:
        """The same, whatever mask_mod hides; masks that hide all, too."""
        first, end = self._seen(rows)
        for start in range(first, end, self.block_k):
            stop = min(start + self.block_k, end)
            tile = Tile(rows.start, rows.stop, start, stop)
            yield tile, self.pairs.visible(tile) if self.masked else None

    def _runs(
        self, rows: slice, first: int, end: int
    ) -> Iterator[tuple[int, int, bool]]:
        """Cut keys into tiles; whether mask_mod may mask some of a tile."""
        if self.expressions is not None and self.expressions.masks:
            keys = slice(first, end)
            yield from self.expressions.runs(rows, keys, self.block_k)
            return
        for start in range(first, end, self.block_k):
            yield start, min(start + self.block_k, end), False

    def _seen(self, rows: slice) -> tuple[int, int]:
        """The keys [first, end) that some of the queries see."""
        keys = self.pairs.seqlen_k
        left, right = self.options.window
        if self.options.causal:
            right = 0 if right is None else min(right, 0)
        shift = keys - self.pairs.seqlen_q
        first = 0 if left is None else max(0, rows.start + shift - left)
        end = keys if right is None else min(keys, rows.stop + shift + right)
        return first, end

    def of(
        self, tile: Tile, visible: np.ndarray | None, *, bends: bool = False
    ) -> tuple[np.ndarray, Cap | None]:
        """Return S, and the softcap if there is one."""
        s, cap = self.before_mod(tile, bends=bends)
        if self.expressions is not None and self.expressions.score:
            s = self.expressions.scored(s, tile)
        return _masked(s, visible), cap

    def differentiated(
        self, tile: Tile, visible: np.ndarray | None
    ) -> tuple[np.ndarray, Cap | None, Slopes | None]:
        """Return S, and the derivatives of the softcap and of score_mod."""
        if self.expressions is None or not self.expressions.score:
            return *self.of(tile, visible), None
        s, cap = self.before_mod(tile)
        s, slopes = self.expressions.differentiated(s, tile, visible)
        return _masked(s, visible), cap, slopes

    def before_mod(
        self, tile: Tile, *, bends: bool = False
    ) -> tuple[np.ndarray, Cap | None]:
        """Return what score_mod gets, and the softcap if there is one."""
        s, cap = self._capped(tile, bends)
        return self._modified(s, tile), cap

    def _capped(
        self, tile: Tile, bends: bool
    ) -> tuple[np.ndarray, Cap | None]:
        """Return scale * QK^T; or, with a softcap, cap * t and its `Cap`."""
        s = (
            self.scaled_q[..., tile.queries, :]
            @ self.k_transposed[..., tile.keys]
        )
        if self.scale != 1:
            s *= self.scale
        if self.options.softcap is None:
            return s, None
        s /= self.options.softcap
        t = np.tanh(s, out=s)
        return t * self.options.softcap, Cap(t, self.options.softcap, bends)

    def _modified(self, s: np.ndarray, tile: Tile) -> np.ndarray:
        """Add ALiBi and bias to capped scores, in place."""
        options = self.options
        if options.alibi_slopes is not None:
            query, key = np.arange(*tile[:2]), np.arange(*tile[2:])
            query += self.pairs.seqlen_k - self.pairs.seqlen_q
            distance = np.abs(query[:, None] - key).astype(s.dtype)
            s -= options.alibi_slopes[..., None, None] * distance
        if options.bias is not None:
            s += tile.of(options.bias)
        return s

    def kept(self, weights: np.ndarray, tile: Tile) -> np.ndarray:
        """The weights that dropout keeps, larger; all without dropout."""
        kept = self.pairs.dropped(weights, tile)
        return kept.astype(weights.dtype, copy=False)

    def factors(self, tile: Tile) -> np.ndarray | None:
        """What dropout multiplies weights by; None without dropout."""
        if self.options.dropout is None:
            return None
        query, key = np.arange(*tile[:2]), np.arange(*tile[2:])
        return self.options.dropout.factors(query, key).astype(self.q.dtype)


def _masked(s: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Return scores, -inf where not visible; in place."""
    if visible is not None:
        np.copyto(s, -np.inf, where=~visible)
    return s


def transposed(x: np.ndarray) -> np.ndarray:
    """Exchange the last two axes, in memory too: faster for small tiles."""
    return np.ascontiguousarray(np.swapaxes(x, -1, -2))
