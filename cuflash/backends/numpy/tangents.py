r"""How the scores of NumPy arrays move in one direction.

W and X' of `cuflash.reference.tangents`. The arrays of a direction have the
names and the axes of the inputs that move.
"""

from __future__ import annotations

import numpy as np

from cuflash.backends.numpy.arrays import Arrays
from cuflash.backends.numpy.scores import Cap, Scores, of_heads, transposed
from cuflash.reference.options import Tile


class Motion:
    """How the scores of some heads, and their values, move."""

    def __init__(
        self, scores: Scores, direction: Arrays, number: int = 0
    ) -> None:
        self.scores, self.number = scores, number
        self.own = {x: of_heads(y, scores.heads) for x, y in direction.items()}
        self.transposed = {
            x: transposed(self.own[x]) for x in "kv" if x in self.own
        }

    def of(
        self, tile: Tile, cap: Cap | None, visible: np.ndarray | None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return W and X'; None is 0. Masked pairs have a W too."""
        w, x_dot = self.before_mod(tile, cap)
        own = self.scores.expressions
        if own is not None and own.score is not None:
            x, _ = self.scores.before_mod(tile)
            w = own.moved(x, tile, w, self.number, visible)
        return w, x_dot

    def before_mod(
        self, tile: Tile, cap: Cap | None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return W_X, the tangent of what score_mod gets, and X'."""
        scores, own, x_dot = self.scores, self.own, None
        if "q" in own:
            keys = scores.k_transposed[..., tile.keys]
            x_dot = own["q"][..., tile.queries, :] @ keys
        if "k" in own:
            keys = self.transposed["k"][..., tile.keys]
            product = scores.q[..., tile.queries, :] @ keys
            x_dot = product if x_dot is None else x_dot + product
        w = None
        if x_dot is not None:
            x_dot *= scores.pairs.scale
            w = x_dot if cap is None else x_dot * cap.slope
        if "bias" in own:
            bias = tile.of(own["bias"])
            w = bias if w is None else w + bias
        return w, x_dot

    def v_of(self, tile: Tile) -> np.ndarray | None:
        """Return the tangents of a tile's values."""
        return self.own["v"][..., tile.keys, :] if "v" in self.own else None
