"""The options of a call, except scale, and their effect on a tile.

`Options` holds the options, with the leading axes of q; `Tiles` computes for
any tile which pairs are visible, the scores, and what dropout keeps. Every
function of `attention`, `forward` and `backward` takes the fields of
`Options` as keyword arguments.

Example
-------
The fields of `Options` are the keyword arguments of every schedule.

>>> import numpy as np
>>> from cuflash.reference.attention import attention
>>> from cuflash.reference.options import Options, Tile, Tiles
>>> options = Options(causal=True, window=(2, None))
>>> pairs = Tiles(6, 6, 1.0, options)
>>> print(pairs.visible(Tile(0, 6, 0, 6)).astype(int))
[[1 0 0 0 0 0]
 [1 1 0 0 0 0]
 [1 1 1 0 0 0]
 [0 1 1 1 0 0]
 [0 0 1 1 1 0]
 [0 0 0 1 1 1]]
>>> [pairs.skips(Tile(4, 6, j, j + 2)) for j in (0, 2, 4)]
[True, False, False]

Arrays of three or four axes have heads before tokens. Since those of
`cuflash.forward` do not, the call has to say so:

>>> q = np.zeros((1, 16, 4, 8))  # batch, seqlen, heads, head_dim
>>> attention(q, q, q)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: q has shape (1, 16, 4, 8), taken for (batch, heads, ...
>>> q = np.swapaxes(q, -2, -3)
>>> out, lse = attention(q, q, q, heads_first=True)
>>> out.shape, lse.shape
((1, 4, 16, 8), (1, 4, 16))
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from . import expressions, masks, scores
from .dropout import Dropout
from .expressions import Function, Gather, HeadIndices, Moving, Place
from .masks import Visibility, Window
from .scores import quiet
from .tile_state import TileState


class Queries(NamedTuple):
    """Some of a sequence's queries.

    Attributes
    ----------
    indices : ndarray of int, (rows,)
        Which, in ascending order.
    seqlen_q : int
        How many queries the sequence has.
    """

    indices: np.ndarray
    seqlen_q: int


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a call. Arrays broadcast to the leading axes of q.

    Attributes
    ----------
    causal : bool
    window : tuple of (int or None)
        (left, right); see `masks`.
    softcap : float or None
        See `scores`, also for alibi_slopes, bias and sink.
    alibi_slopes : ndarray, (...), or None
    bias : ndarray, (..., seqlen_q, seqlen_k), or None
        Or broadcastable to this shape.
    mask : ndarray of bool, (..., seqlen_q, seqlen_k), or None
        True keeps a pair. Or broadcastable to this shape.
    sink : ndarray, (...), or None
    segment_ids_q, segment_ids_k : ndarray of int, (..., seqlen), or None
        Both or neither.
    dropout : Dropout or None
    score_mod, mask_mod : callable or None
        See `expressions`, also for mod_arrays. score_mod follows bias;
        mask_mod joins the other masks.
    mod_arrays : dict of str to array_like or number
    return_dmod : tuple of str
        Of mod_arrays, those whose gradients backward returns: in a dict,
        after all other gradients.
    head_indices : HeadIndices or None
        Which batch and head each leading index of q is, to score_mod and
        mask_mod; as `HeadIndices.of` by default.
    largest_score : float or None
        Scores and dot products q_i k_j beyond it become infinite; see
        `scores.in_range`. None: float64's largest number.
    queries : Queries or None
        The rows of q and of all that has an axis of queries, if they are not
        the whole sequence's.
    heads_first : bool
        Says that arrays of 3 or 4 axes are (heads, seqlen, head_dim) or
        (batch, heads, seqlen, head_dim); see `check_axes`.
    """

    causal: bool = False
    window: Window = masks.UNBOUNDED
    softcap: float | None = None
    alibi_slopes: np.ndarray | None = None
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    sink: np.ndarray | None = None
    segment_ids_q: np.ndarray | None = None
    segment_ids_k: np.ndarray | None = None
    dropout: Dropout | None = None
    score_mod: Function | None = None
    mask_mod: Function | None = None
    mod_arrays: Mapping[str, Any] | None = None
    return_dmod: tuple[str, ...] = ()
    head_indices: HeadIndices | None = None
    largest_score: float | None = None
    queries: Queries | None = None
    heads_first: bool = False

    @classmethod
    def of(cls, q: np.ndarray, given: Mapping[str, Any]) -> Options:
        """Return a call's options, once its axes are checked.

        Parameters
        ----------
        q : ndarray, (..., seqlen_q, head_dim)
        given : dict
            The call's keyword arguments.
        """
        options = cls(**given)
        options.check_axes(q)
        if options.score_mod is options.mask_mod is None:
            return options
        heads = options.head_indices or HeadIndices.of(q.shape[:-2])
        return replace(options, head_indices=heads)

    def zeros_of_mod(self) -> dict[str, np.ndarray]:
        """Return sums for the gradients of return_dmod."""
        arrays = self.mod_arrays or {}
        return {x: np.zeros(np.shape(arrays[x])) for x in self.return_dmod}

    def check_axes(self, q: np.ndarray) -> None:
        """Refuse arrays that may be (batch, seqlen, heads, head_dim).

        Here tokens are the last axis but one. In such arrays heads are, and
        each token would attend over its own heads: a wrong result without a
        sign of it. So 3 or 4 axes need `heads_first`. Two axes are one head,
        and five no layout of `cuflash.forward`.

        Raises
        ------
        ValueError
        """
        if self.heads_first or np.ndim(q) not in (3, 4):
            return
        batch = "batch, " if np.ndim(q) == 4 else ""
        raise ValueError(
            f"q has shape {np.shape(q)}, taken for ({batch}heads, seqlen, "
            "head_dim): pass heads_first=True if that is right. Arrays of "
            f"cuflash.forward are ({batch}seqlen, heads, head_dim): "
            "np.swapaxes(x, -2, -3) puts their heads first"
        )


class Tile(NamedTuple):
    """Queries [q_start, q_stop) and keys [k_start, k_stop)."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def queries(self) -> slice:
        """The tile's slice of an axis of queries."""
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        """The tile's slice of an axis of keys."""
        return slice(self.k_start, self.k_stop)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return its part of an array broadcastable to all pairs.

        Parameters
        ----------
        array : array_like, broadcastable to (..., seqlen_q, seqlen_k)

        Returns
        -------
        ndarray, broadcastable to (..., queries, keys)
        """
        array = np.asarray(array)
        array = array.reshape((1,) * (2 - array.ndim) + array.shape)
        rows = self.queries if array.shape[-2] > 1 else slice(None)
        keys = self.keys if array.shape[-1] > 1 else slice(None)
        return array[..., rows, keys]


class Scores(NamedTuple):
    """Scores of a tile, and their derivatives.

    Attributes
    ----------
    s : ndarray, (..., rows, keys)
        -inf where not visible.
    slope : ndarray or float, broadcastable to s
        With respect to scale * QK^T; 1.0 without a softcap and score_mod.
    visible : ndarray of bool, broadcastable to s, or None
        None: all is visible.
    slope_bias : ndarray or float, broadcastable to s
        With respect to a bias; 1.0 without score_mod.
    gathers : dict of Gather to ndarray
        With respect to what score_mod reads; see `expressions.Modified`.
    slope_cap : ndarray or float, broadcastable to s
        The softcap's slope; 1.0 without.
    argument : ndarray, (..., rows, keys), or None
        What score_mod is given; None without one.
    """

    s: np.ndarray
    slope: np.ndarray | float
    visible: np.ndarray | None
    slope_bias: np.ndarray | float = 1.0
    gathers: Mapping[Gather, np.ndarray] = {}
    slope_cap: np.ndarray | float = 1.0
    argument: np.ndarray | None = None


class Tiles:
    """The tiles of one call's pairs."""

    def __init__(
        self, seqlen_q: int, seqlen_k: int, scale: float, options: Options
    ) -> None:
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k
        self.scale, self.options = scale, options

    def whole(self) -> Tile:
        """Return all pairs as one tile."""
        return Tile(0, self.seqlen_q, 0, self.seqlen_k)

    def visible(self, tile: Tile) -> np.ndarray | None:
        """Return the tile's mask, (..., rows, keys); None: all visible."""
        o, given = self.options, []
        if self._visibility(tile) is not Visibility.ALL:
            query, key = self._tokens(tile)
            given.append(masks.visible_pairs(query, key, *self._bounds()))
        if o.segment_ids_q is not None:
            ids_q = np.asarray(o.segment_ids_q)[..., tile.queries]
            ids_k = np.asarray(o.segment_ids_k)[..., tile.keys]
            given.append(masks.same_segment(ids_q, ids_k))
        if o.mask is not None:
            given.append(tile.of(o.mask))
        if o.mask_mod is not None:
            place, arrays = self._place(tile), o.mod_arrays or {}
            given.append(expressions.visible(o.mask_mod, place, arrays))
        if not given:
            return None
        together: np.ndarray = functools.reduce(np.logical_and, given)
        shape = (tile.q_stop - tile.q_start, tile.k_stop - tile.k_start)
        return np.broadcast_to(together, (*together.shape[:-2], *shape))

    def skips(self, tile: Tile) -> bool:
        """Whether nothing of a tile is visible, in any leading index."""
        if self._visibility(tile) is Visibility.NONE:
            return True
        visible = self.visible(tile)
        return visible is not None and not visible.any()

    @quiet
    def scores(self, q: np.ndarray, k: np.ndarray, tile: Tile) -> Scores:
        """Return the scores of a tile's rows of q and k.

        Parameters
        ----------
        q : ndarray, (..., rows, head_dim)
        k : ndarray, (..., keys, head_dim)
        tile : Tile
            The tile that they belong to.
        """
        o = self.options
        slope: np.ndarray | float = 1.0
        visible = self.visible(tile)
        s = scores.scores_of(q, k, self.scale, largest=o.largest_score)
        if o.softcap is not None:
            s = scores.softcap(s, o.softcap)
            slope = scores.softcap_slope(s, o.softcap)
        if o.alibi_slopes is not None:
            query, key = self._tokens(tile)
            shift = self.seqlen_k - self._bounds()[0]
            s = s + scores.alibi(o.alibi_slopes, query, key, shift)
        if o.bias is not None:
            s = s + tile.of(o.bias)
        if not (o.alibi_slopes is o.bias is None):
            s = scores.in_range(s, o.largest_score)
        if o.score_mod is None:
            s = _masked(s, visible)
            return Scores(s, slope, visible, slope_cap=slope)
        argument = s
        s, of_mod, gathers = expressions.score(
            *(o.score_mod, s, self._place(tile), o.mod_arrays or {}),
            gradients=o.return_dmod,
        )
        s = _masked(scores.in_range(s, o.largest_score), visible)
        derivatives = slope * of_mod, visible, of_mod, gathers
        return Scores(s, *derivatives, slope, argument)

    @quiet
    def moving(
        self,
        scores: Scores,
        tile: Tile,
        w: np.ndarray,
        dots: Mapping[str, np.ndarray],
    ) -> Moving:
        """Return how a tile's scores move; see `expressions.moving`.

        Parameters
        ----------
        scores : Scores
            The tile's.
        tile : Tile
        w : ndarray
            The tangent of what score_mod is given.
        dots : dict of str to ndarray
            Those of its arrays.
        """
        o = self.options
        if o.score_mod is None or scores.argument is None:
            return Moving(w, 0.0, {})
        found = expressions.moving(
            *(o.score_mod, scores.argument, self._place(tile)),
            *(o.mod_arrays or {}, w, dots),
            gradients=o.return_dmod,
        )
        shape = np.broadcast_shapes(np.shape(found.w), scores.argument.shape)
        return found._replace(w=np.broadcast_to(found.w, shape))

    @quiet
    def curvature(self, q: np.ndarray, k: np.ndarray) -> np.ndarray | None:
        """Return the second derivative of capped scores; None if it is 0.

        With respect to scale * QK^T, as `Scores.slope_cap`.

        Parameters
        ----------
        q : ndarray, (..., rows, head_dim)
        k : ndarray, (..., keys, head_dim)
        """
        o = self.options
        if o.softcap is None:
            return None
        s = scores.scores_of(q, k, self.scale, largest=o.largest_score)
        return scores.softcap_curvature(
            scores.softcap(s, o.softcap), o.softcap
        )

    @quiet
    def dropped(self, weights: np.ndarray, tile: Tile) -> np.ndarray:
        """Return weights * Z; see `dropout`."""
        if self.options.dropout is None:
            return weights
        return weights * self.options.dropout.factors(*self._tokens(tile))

    def start(self, rows: tuple[int, ...], head_dim_v: int) -> TileState:
        """Return the state of rows before any key: the sink's, if any."""
        if self.options.sink is None:
            return TileState.empty(rows, head_dim_v)
        sink = np.asarray(self.options.sink, np.float64)[..., None]
        sink = np.broadcast_to(sink, rows)
        return TileState.of_result(np.zeros((*rows, head_dim_v)), sink)

    def _visibility(self, tile: Tile) -> Visibility:
        """What causal mask and window leave of a tile, or of more queries."""
        if self.options.queries is not None:
            index = self.options.queries.indices[tile.queries]
            tile = tile._replace(q_start=index[0], q_stop=index[-1] + 1)
        return masks.tile_visibility(*tile, *self._bounds())

    def _bounds(self) -> tuple[int, int, bool, Window]:
        """What `masks` needs beside a tile, of the whole sequence."""
        o = self.options
        total = self.seqlen_q if o.queries is None else o.queries.seqlen_q
        return total, self.seqlen_k, o.causal, o.window

    def _place(self, tile: Tile) -> Place:
        """Where the tile's pairs are in their sequence."""
        lengths = self._bounds()[:2]
        heads = self.options.head_indices or HeadIndices()
        return Place(*self._tokens(tile), *lengths, heads)

    def _tokens(self, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        query = np.arange(tile.q_start, tile.q_stop)
        if self.options.queries is not None:
            query = self.options.queries.indices[tile.queries]
        return query, np.arange(tile.k_start, tile.k_stop)


def _masked(s: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Return scores, -inf where not visible."""
    return s if visible is None else np.where(visible, s, -np.inf)
