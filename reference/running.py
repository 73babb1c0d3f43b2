r"""Welford's variance: a running state, as in online softmax.

The variance needs the mean of all values, as the softmax needs their
maximum. In both, a running state replaces the whole data and is corrected
when its reference point changes. In both, two states merge, so the data may
be split anywhere (compare `tile_state`)::

    softmax     (m, l, acc)       corrected by the factor e^(m - m')
    variance    (n, mean, M2)     corrected by the term (x - mean)(x - mean')

[000] sees relatives of this pattern. A Cauchy sequence is one whose terms
come close to each other, so that its convergence can be told without its
limit, as a state is corrected without the final maximum. Abel summation
rewrites a sum of products by partial sums and differences of neighbours, so
that the accumulated quantity becomes the primary one, as here the state. Kahan
summation carries the rounding error of the sum so far beside the sum, and
corrects each new term by it.

Sources: [000], "Connections to other online algorithms" and "Quiz: Online
variance"; [W] Welford 1962, doi:10.1080/00401706.1962.10490022; [CGL] Chan,
Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.

Example
-------
The variance of four numbers, one by one; then from the states of two halves:

>>> import numpy as np
>>> from cuflash.reference.running import Moments, welford
>>> state = Moments.empty()
>>> for x in (2.0, 4.0, 6.0, 8.0):
...     state = state.add(x)
...     print(state)
n 1  mean 2.0  M2 0.0
n 2  mean 3.0  M2 2.0
n 3  mean 4.0  M2 8.0
n 4  mean 5.0  M2 20.0
>>> both = welford([2.0, 4.0]).merge(welford([6.0, 8.0]))
>>> print(both.variance(), np.var([2.0, 4.0, 6.0, 8.0]))
5.0 5.0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# inf and NaN give their usual results, without a warning.
quiet = np.errstate(over="ignore", invalid="ignore")


@dataclass(frozen=True)
class Moments:
    """The number, mean and spread of some values.

    Attributes
    ----------
    n : int
        Number of values.
    mean : ndarray, (...)
        Their mean, 0 before any value.
    m2 : ndarray, (...)
        Sum of (x - mean)^2, [000]'s (N - 1) S_N^2.
    """

    n: int
    mean: np.ndarray
    m2: np.ndarray

    def __str__(self) -> str:
        return f"n {self.n}  mean {self.mean}  M2 {self.m2}"

    @classmethod
    def empty(cls, shape: tuple[int, ...] = ()) -> Moments:
        """Return the state of no values, the identity of `merge`."""
        return cls(0, np.zeros(shape), np.zeros(shape))

    @quiet
    def add(self, x: np.ndarray) -> Moments:
        r"""Return the state after one more value.

        .. math::
            mean' &= mean + (x - mean) / n' \\
            M2' &= M2 + (x - mean)(x - mean')

        [000], "Quiz: Online variance"; [W], eq. I.

        Parameters
        ----------
        x : ndarray, (...)
        """
        n = self.n + 1
        mean = self.mean + (x - self.mean) / n
        return Moments(n, mean, self.m2 + (x - self.mean) * (x - mean))

    @quiet
    def merge(self, other: Moments) -> Moments:
        r"""Return the state of both sets of values together.

        .. math::
            mean' &= mean_a + (mean_b - mean_a)\, n_b / n' \\
            M2' &= M2_a + M2_b + (mean_b - mean_a)^2\, n_a n_b / n'

        [CGL], eq. 2.1. With one value in b it is `add`.
        """
        n = self.n + other.n
        if n == 0:
            return self
        apart = other.mean - self.mean
        return Moments(
            n,
            self.mean + apart * (other.n / n),
            self.m2 + other.m2 + apart**2 * (self.n * other.n / n),
        )

    def variance(self, ddof: int = 0) -> np.ndarray:
        """Return M2 / (n - ddof).

        Parameters
        ----------
        ddof : int, optional
            0 as in numpy.var; 1 gives [000]'s S^2. There must be more
            values than that.

        Returns
        -------
        ndarray, (...)
        """
        if self.n <= ddof:
            raise ValueError(
                f"a variance with ddof {ddof} needs more than {ddof} "
                f"values, got {self.n}"
            )
        return self.m2 / (self.n - ddof)


def welford(x: np.ndarray) -> Moments:
    """Take the values of each row one by one ([000]; [W]).

    Parameters
    ----------
    x : array_like, (..., values)

    Returns
    -------
    Moments
        Of shape (...).
    """
    x = np.asarray(x, np.float64)
    state = Moments.empty(x.shape[:-1])
    for k in range(x.shape[-1]):
        state = state.add(x[..., k])
    return state
