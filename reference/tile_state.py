r"""The state (m, l, acc) of a subset of the keys, and the merge of states.

For a set J of keys, a row's state is

.. math::
    m = \max_{j \in J} S_j,\quad l = \sum_{j \in J} e^{S_j - m},\quad
    acc = \sum_{j \in J} e^{S_j - m} V_j .

Merging the states of two disjoint sets gives the state of their union; the
empty set is the identity. So the keys may be split and grouped in any way,
and an element is a tile of size 1. Sources: [000], "Element is tile"; [001],
"Putting it all together"; [FA2] Dao 2023, arXiv:2307.08691, Algorithm 1.

Example
-------
One row, four keys, two tiles of two keys. Merging the states of the tiles, in
either order, gives the state of all keys.

>>> import numpy as np
>>> from cuflash.reference.tile_state import TileState
>>> scores = np.log([[1.0, 2.0, 4.0, 1.0]])
>>> values = np.array([[8.0], [8.0], [0.0], [16.0]])
>>> first = TileState.of_tile(scores[:, :2], values[:2])
>>> print(first)
m 0.693  l 1.500  acc [12.]
>>> second = TileState.of_tile(scores[:, 2:], values[2:])
>>> print(second)
m 1.386  l 1.250  acc [4.]
>>> print(first.merge(second))
m 1.386  l 2.000  acc [10.]
>>> out, lse = second.merge(first).finalize()
>>> print(out, np.exp(lse))
[[5.]] [8.]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .masks import masked_product
from .softmax import exp_shifted, normalise, row_max, shift_of


@dataclass(frozen=True)
class TileState:
    """The state of some rows after some of their keys.

    Attributes
    ----------
    m : ndarray, (..., rows)
        Running maximum, -inf before any score above it.
    l : ndarray, (..., rows)
        Sum of exp(score - m).
    acc : ndarray, (..., rows, head_dim_v)
        Sum of exp(score - m) * value, not yet divided by l.
    """

    m: np.ndarray
    l: np.ndarray  # noqa: E741 (the papers' name)
    acc: np.ndarray

    def __str__(self) -> str:
        rows = zip(
            self.m.ravel(),
            self.l.ravel(),
            self.acc.reshape(self.m.size, self.acc.shape[-1]),
            strict=True,
        )
        with np.printoptions(precision=3, suppress=True):
            return "\n".join(
                f"m {m:.3f}  l {l:.3f}  acc {acc}"
                for m, l, acc in rows  # noqa: E741
            )

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim_v: int) -> TileState:
        """Return the state of no keys, the identity of `merge`.

        Parameters
        ----------
        rows : tuple of int
            Shape of m, the leading axes and the number of rows.
        head_dim_v : int
        """
        return cls(
            np.full(rows, -np.inf),
            np.zeros(rows),
            np.zeros((*rows, head_dim_v)),
        )

    @classmethod
    def of_tile(
        cls,
        scores: np.ndarray,
        values: np.ndarray,
        visible: np.ndarray | None = None,
    ) -> TileState:
        """Return the state of one tile of keys.

        Parameters
        ----------
        scores : ndarray, (..., rows, keys)
            Scaled scores, -inf where a pair is not visible.
        values : ndarray, (..., keys, head_dim_v)
        visible : ndarray of bool, broadcastable to scores, optional
            Keeps NaN and inf in values out of rows that do not see them.
        """
        scores = np.asarray(scores, np.float64)
        values = np.asarray(values, np.float64)
        nothing = cls.empty(scores.shape[:-1], values.shape[-1])
        return nothing.update(scores, values, visible)

    @classmethod
    def of_result(cls, out: np.ndarray, lse: np.ndarray) -> TileState:
        """Return a state that finalizes to a given (out, lse).

        It has m = lse, l = 1 and acc = out: out is already divided.

        Parameters
        ----------
        out : ndarray, (..., rows, head_dim_v)
        lse : ndarray, (..., rows)
        """
        lse = np.asarray(lse, np.float64)
        empty = lse == -np.inf
        # -0 is the identity of +: 0 + -0 is 0.
        acc = np.where(empty[..., None], -0.0, np.asarray(out, np.float64))
        return cls(lse, np.where(empty, 0.0, 1.0), acc)

    def update(
        self,
        scores: np.ndarray,
        values: np.ndarray,
        visible: np.ndarray | None = None,
        drop: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> TileState:
        r"""Return the state after one more tile of keys.

        .. math::
            m' &= \max(m, \mathrm{rowmax}(S)) \\
            P &= e^{S - m'} \\
            l' &= l e^{m - m'} + \mathrm{rowsum}(P) \\
            acc' &= acc\, e^{m - m'} + P V

        [FA2], Algorithm 1, lines 9 and 10; [001]. It is the merge with the
        tile's state, without forming that state.

        Parameters
        ----------
        scores, values, visible
            As in `of_tile`.
        drop : function, optional
            Maps P to the weights that multiply V; l sums P itself.
        """
        m = np.fmax(self.m, row_max(scores))
        p = exp_shifted(scores, m)
        kept = p if drop is None else drop(p)
        product = masked_product(kept, values, visible)
        with np.errstate(over="ignore", invalid="ignore"):
            correction = np.exp(self.m - shift_of(m))
            return TileState(
                m,
                self.l * correction + p.sum(axis=-1),
                self.acc * correction[..., None] + product,
            )

    def merge(self, other: TileState) -> TileState:
        r"""Return the state of both sets of keys together.

        .. math::
            m' &= \max(m_a, m_b) \\
            l' &= l_a e^{m_a - m'} + l_b e^{m_b - m'} \\
            acc' &= acc_a e^{m_a - m'} + acc_b e^{m_b - m'}

        [000], "The tile abstraction".
        """
        m = np.fmax(self.m, other.m)
        with np.errstate(over="ignore", invalid="ignore"):
            a = np.exp(self.m - shift_of(m))
            b = np.exp(other.m - shift_of(m))
            return TileState(
                m,
                self.l * a + other.l * b,
                self.acc * a[..., None] + other.acc * b[..., None],
            )

    def finalize(self) -> tuple[np.ndarray, np.ndarray]:
        """Divide once: out = acc / l, lse = m + log(l).

        [FA2], Algorithm 1, lines 12 and 13.

        Returns
        -------
        out : ndarray, (..., rows, head_dim_v)
            0 for a row that saw no key, or only scores of -inf with finite
            values.
        lse : ndarray, (..., rows)
            -inf for such a row.
        """
        return normalise(self.acc, self.l), logsumexp_of(self.m, self.l)


def logsumexp_of(m: np.ndarray, l: np.ndarray) -> np.ndarray:  # noqa: E741
    """Return lse = m + log(l), -inf where l is 0, inf where m is.

    [001], "The log-sum-exp trick": lse = log(sum_j exp(S_j)).

    Parameters
    ----------
    m, l : ndarray, (..., rows)

    Returns
    -------
    ndarray, (..., rows)
    """
    empty = l == 0
    with np.errstate(invalid="ignore"):
        lse = np.where(empty, -np.inf, m + np.log(np.where(empty, 1.0, l)))
    return np.where(m == np.inf, np.inf, lse)  # l is NaN there


def probabilities_from_lse(
    scores: np.ndarray,
    lse: np.ndarray,
    visible: np.ndarray | None = None,
    rest: np.ndarray | None = None,
) -> np.ndarray:
    """Recompute the weights: P = exp(S - lse), with a rest exp(-rest) times.

    [001], "The log-sum-exp trick". A row whose lse is -inf saw no key, or
    only scores of -inf: its weights are 0. One whose lse is inf has a score
    of inf: its weights are NaN, as softmax has them.

    Parameters
    ----------
    scores : ndarray, (..., rows, keys)
    lse : ndarray, (..., rows)
    visible : ndarray of bool, broadcastable to scores, optional
    rest : ndarray, (..., rows), optional
        What the rounding of lse has taken from it (`lse_rest`).

    Returns
    -------
    ndarray, (..., rows, keys)
    """
    lse = np.asarray(lse, np.float64)
    lse = np.where(lse == np.inf, np.nan, lse)
    p = np.where(lse[..., None] == -np.inf, 0.0, exp_shifted(scores, lse))
    if rest is not None:
        p *= np.exp(-rest)[..., None]
    return p if visible is None else np.where(visible, p, 0.0)


def merge_tree(states: Sequence[TileState]) -> TileState:
    """Merge one or more states by a balanced tree, neighbours first."""
    states = list(states)
    while len(states) > 1:
        pairs = [
            a.merge(b) for a, b in zip(states[::2], states[1::2], strict=False)
        ]
        states = pairs + states[2 * len(pairs) :]
    return states[0]


def merge_vjp(
    dout: np.ndarray,
    dlse: np.ndarray,
    results: Sequence[tuple[np.ndarray, np.ndarray]],
    out: np.ndarray,
    lse: np.ndarray,
) -> list[tuple[np.ndarray, np.ndarray]]:
    r"""Gradients of each (out_i, lse_i) from those of their merge.

    .. math::
        w_i &= e^{lse_i - lse} \\
        dout_i &= w_i\, dout \\
        dlse_i &= w_i\, (dout \cdot (out_i - out) + dlse)

    A row of a part whose lse is -inf takes no part: its gradients are 0.

    Parameters
    ----------
    dout : ndarray, (..., rows, head_dim_v)
    dlse : ndarray, (..., rows)
    results : sequence of (out_i, lse_i)
        What was merged, shaped like `dout` and `dlse`.
    out, lse : ndarray
        The merge.

    Returns
    -------
    list of (dout_i, dlse_i)
    """
    gradients = []
    for out_i, lse_i in results:
        w = probabilities_from_lse(lse_i[..., None], lse)  # (..., rows, 1)
        seen = lse_i[..., None] != -np.inf
        difference = np.where(seen, out_i, 0.0) - np.where(seen, out, 0.0)
        of_lse = (dout * difference).sum(axis=-1) + dlse
        gradients.append((w * dout, w[..., 0] * of_lse))
    return gradients
