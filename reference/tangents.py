r"""Tangents of the inputs, and the tangent of a tile of scores.

A direction moves q, k, v, bias and sink with the velocities Q', K', V', B'
and s'. Scaled dot products X = scale * QK^T are bilinear in Q and K, a softcap
has the slope g, and a bias is added last, so that scores move with

.. math::
    X' &= scale \cdot (Q' K^T + Q K'^T) \\
    W &= S' = g \circ X' + B'.

ALiBi adds nothing to W, because slopes do not move. A masked pair has no
score, so W is 0 there, whatever stands in Q' and K'. A score_mod f
(`expressions`), whose arrays a may move with velocities a', maps W to

.. math:: f_x W + \sum_a f_a a'.

Example
-------
W is the rate at which scores change:

>>> import numpy as np
>>> from cuflash.reference.options import Options, Tiles
>>> from cuflash.reference.tangents import Direction
>>> rng = np.random.default_rng(0)
>>> q, q_dot = rng.standard_normal((2, 3, 4))
>>> k, k_dot = rng.standard_normal((2, 5, 4))
>>> pairs = Tiles(3, 5, 0.5, Options(softcap=2.0))
>>> whole = pairs.whole()
>>> scores = pairs.scores(q, k, whole)
>>> direction = Direction(q=q_dot, k=k_dot)
>>> w, _ = direction.of_scores(pairs, q, k, whole, scores)
>>> h = 1e-6
>>> moved = [
...     pairs.scores(q + t * q_dot, k + t * k_dot, whole).s for t in (h, -h)
... ]
>>> np.allclose(w, (moved[0] - moved[1]) / (2 * h))
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from .expressions import Moving
from .masks import masked
from .options import Scores, Tile, Tiles
from .scores import quiet, rows_with_rows


@dataclass(frozen=True, eq=False)
class Direction:
    """Tangents of a call's inputs; None where an input does not move.

    Attributes
    ----------
    q : array_like, (..., seqlen_q, head_dim), or None
    k : array_like, (..., seqlen_k, head_dim), or None
    v : array_like, (..., seqlen_k, head_dim_v), or None
    bias : array_like, broadcastable to (..., seqlen_q, seqlen_k), or None
    sink : array_like, broadcastable to (...), or None
        The leading axes are those of the call's q, after any number of
        others: several directions at once.
    mods : dict of str to array_like
        Of some of mod_arrays, with their shapes: one direction.
    """

    q: np.ndarray | None = None
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    bias: np.ndarray | None = None
    sink: np.ndarray | None = None
    mods: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for x in fields(self):
            given = getattr(self, x.name)
            if given is not None and x.name != "mods":
                wide = np.asarray(given, np.float64)
                object.__setattr__(self, x.name, wide)

    def leading(self, q: np.ndarray) -> tuple[int, ...]:
        """Return the leading axes of results: those of q, after the others."""
        shapes = [q.shape[:-2]]
        for tangent in (self.q, self.k, self.v, self.bias):
            if tangent is not None:
                shapes.append(tangent.shape[:-2])
        if self.sink is not None:
            shapes.append(self.sink.shape)
        return np.broadcast_shapes(*shapes)

    @quiet
    def of_scores(
        self,
        pairs: Tiles,
        q: np.ndarray,
        k: np.ndarray,
        tile: Tile,
        scores: Scores,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return W and X' of a tile, both 0 where not visible.

        The arguments are those of `moving`.
        """
        moving, x_dot = self.moving(pairs, q, k, tile, scores)
        visible = scores.visible
        return masked(moving.w, visible), masked(x_dot, visible)

    @quiet
    def moving(
        self,
        pairs: Tiles,
        q: np.ndarray,
        k: np.ndarray,
        tile: Tile,
        scores: Scores,
    ) -> tuple[Moving, np.ndarray]:
        """Return how the scores of a tile and their slopes move, and X'.

        Parameters
        ----------
        pairs : Tiles
        q : ndarray, (..., rows, head_dim)
        k : ndarray, (..., keys, head_dim)
        tile : Tile
            The tile that they belong to.
        scores : Scores
            Those of the tile.
        """
        x_dot = np.zeros((q.shape[-2], k.shape[-2]))
        if self.q is not None:
            x_dot = x_dot + rows_with_rows(self.q[..., tile.queries, :], k)
        if self.k is not None:
            x_dot = x_dot + rows_with_rows(q, self.k[..., tile.keys, :])
        x_dot = pairs.scale * x_dot
        w = scores.slope_cap * x_dot
        if self.bias is not None:
            w = w + tile.of(self.bias)
        return pairs.moving(scores, tile, w, self.mods), x_dot
