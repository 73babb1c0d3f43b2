r"""Which pairs dropout keeps: a function of only the seed and the pair.

[PH] Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3", doi:10.1145/2063384.2063405: Philox4x32-10. A counter of four words
and a key of two words give four words of random bits. The generator has no
state, so a pair's bits can be computed at any time and anywhere.

Example
-------
Z depends on the seed and on the pair only: a tile has the Z that it has in
the whole.

>>> import numpy as np
>>> from cuflash.reference.dropout import Dropout
>>> drop = Dropout(0.5, seed=1)
>>> whole = drop.factors(np.arange(3), np.arange(8))
>>> print(whole)
[[2. 2. 2. 2. 2. 2. 0. 2.]
 [2. 0. 0. 0. 2. 2. 0. 0.]
 [2. 0. 0. 0. 2. 0. 0. 2.]]
>>> tile = drop.factors(np.array([2]), np.arange(4, 8))
>>> print(tile)
[[2. 0. 0. 2.]]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# [PH], section 4.3 and table 2: multipliers, and increments of the key.
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(
    counter: tuple[np.ndarray, ...], key: tuple[int, int], rounds: int = 10
) -> tuple[np.ndarray, ...]:
    """Return four words of random bits ([PH], section 4.3).

    Parameters
    ----------
    counter : tuple of four ndarrays of int below 2**32
        Broadcast against each other.
    key : tuple of two ints below 2**32
    rounds : int, optional

    Returns
    -------
    tuple of four ndarrays of uint64
        Below 2**32.
    """
    c0, c1, c2, c3 = (np.asarray(x, np.uint64) for x in counter)
    k0, k1 = (np.uint64(x) for x in key)
    for _ in range(rounds):
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (b >> _32) ^ c1 ^ k0,
            b & _LOW,
            (a >> _32) ^ c3 ^ k1,
            a & _LOW,
        )
        k0, k1 = ((k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW)
    return c0, c1, c2, c3


def threshold(probability: float) -> int:
    """Return the smallest word that keeps a pair."""
    return int(probability * 2.0**32)


class Dropout(NamedTuple):
    """Drop pairs at random.

    Attributes
    ----------
    probability : float
        That a pair is dropped, in [0, 1).
    seed : int
        Below 2**64.
    batch, head : int or ndarray of int
        Their indices, broadcastable to the leading axes of q.
    """

    probability: float
    seed: int = 0
    batch: np.ndarray | int = 0
    head: np.ndarray | int = 0

    def factors(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Return Z: 0 for dropped pairs, else 1 / (1 - probability).

        The counter is (key // 4, query, head, batch); the word is number
        key % 4.

        Parameters
        ----------
        query, key : ndarray of int, (rows,) and (keys,)

        Returns
        -------
        ndarray, (..., rows, keys)
        """
        batch, head = (
            np.asarray(x)[..., None, None] for x in (self.batch, self.head)
        )
        words = philox(
            (key[None, :] // 4, query[:, None], head, batch),
            (self.seed & 0xFFFFFFFF, self.seed >> 32),
        )
        word = np.choose(key % 4, np.broadcast_arrays(*words))
        keep = word >= np.uint64(threshold(self.probability))
        return np.where(keep, 1.0 / (1.0 - self.probability), 0.0)
