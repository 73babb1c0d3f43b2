r"""`tiny`: how far rounding alone may move a result.

An error may be ``factor * max|low - ref|``, or `tiny` (compare.py).
`low` can be right by luck: with one key P is 1, and with a handful of
elements some roundings are exact. `tiny` is what the first-order errors of
an exact algorithm come to, so that luck cannot turn right results red.

Write u for `Precision.unit`, f for `floor` and e for `sum_unit` of the
dtype. Per pair (i, j), relative errors of a probability:

    P rounded to the dtype                    u
    score, a float32 sum of head_dim terms    e sqrt(d) |q||k| scale
    scaling, shift by m, argument of exp2     4 e (|s| + |m|)
    exp2 itself, 2 ulp                        4 e
    lse rounded (backward only)               e |lse|

and absolutely f, for what is subnormal in the dtype or flushed; all of one
sign, so these just add up.

Sums of n float32 terms carry e sqrt(n) times the sum of magnitudes: each
addition rounds its partial sum, signs at random. In a product, errors w_j
of n terms come together as ``sqrt(sum w_j^2)``. We allow three times that:
sqrt(9), so it is the worst case for up to nine terms (Cauchy and Schwarz);
beyond, where errors are uniform in +-w and have standard deviation
w / sqrt(3), it is 5.2 deviations.

Gradients: delta comes from the rounded out, with the error of out itself,
one error for a whole row, so it enters dq through ``|P K|`` and not through
a root of squares.
"""

import numpy as np

from .dtypes import PRECISION
from .heads import heads_first, sum_groups, visible

# Errors of relative size beyond this are no longer of first order, and a
# bound made of them would hide faults. Such tests must use exact scores.
LARGEST_RELATIVE = 2.0**-4


class Rounding:
    """First-order errors of one call, in (batch, heads, rows, columns).

    Parameters
    ----------
    dout, q, k, v : ndarray
        In the public layout; dout may be None. What is not finite counts
        as 0: elements that read it are compared by position.
    lse : ndarray, (batch, heads, seqlen_q)
        Of the reference.
    exact_scores : bool
        The test made q and k so that every float32 score is exact.
    """

    def __init__(self, dout, q, k, v, lse, *, scale, causal, exact_scores):
        self.heads_kv = k.shape[2]
        self.precision = PRECISION[q.dtype.name]
        self.scale = scale
        heads = q.shape[2]
        self.dout, self.q, self.k, self.v = (
            None if x is None else heads_first(finite(x), heads)
            for x in (dout, q, k, v)
        )
        self.see = visible(q.shape[1], k.shape[1], causal)
        self.exact_scores = exact_scores
        self.lse_ref = finite(lse)
        self._probabilities(self.lse_ref)

    def _probabilities(self, lse):
        u, f, e = self.precision
        d = self.q.shape[-1]
        s = self.q @ self.k.swapaxes(-1, -2) * self.scale
        s = np.where(self.see, s, -np.inf)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        m = np.where(m == -np.inf, 0, m)
        self.p = np.exp(s - m)
        total = self.p.sum(axis=-1, keepdims=True)
        self.p /= np.where(total == 0, 1, total)
        s = np.where(self.p > 0, s, 0)  # errors of no weight do not count

        magnitude = np.abs(self.q) @ np.abs(self.k).swapaxes(-1, -2)
        delta = e * np.sqrt(d) * np.abs(self.scale) * magnitude
        delta += 4 * e * (np.abs(s) + np.abs(m))
        lse_error = e * np.abs(lse)[..., None]
        if self.exact_scores:
            # The row's maximum less itself is 0, and lse is m if it is alone.
            delta = np.where(s == m, 0, 4 * e * (np.abs(s) + np.abs(m)))
            lse_error = np.where(total == 1, 0, lse_error)
        delta = np.where(self.p > 0, delta, 0)
        self.score_error = self.p * delta
        backward = delta + (0 if self.dout is None else lse_error)
        backward = np.where(self.p > 0, backward, 0)
        largest = (self.p * backward).max(initial=0)
        assert largest < LARGEST_RELATIVE, "use exact scores"
        relative = u + 4 * e + backward
        self.w = self.p * relative

    def out(self):
        """Return the errors of out, one an element."""
        u, f, e = self.precision
        out = self.p @ self.v
        keys = self.k.shape[-2]
        row = (self.w**2).sum(axis=-1, keepdims=True)
        return (
            3 * np.sqrt(self.w**2 @ self.v**2 + row * out**2)
            + (u + e * (np.sqrt(keys) + 4)) * np.abs(out)
            + f * (1 + lost(self.v))
        )

    def lse(self):
        """Return the errors of lse, one a row.

        An error of a score moves lse by P times it. Then the sum of
        weights (relative to which log is absolute), log itself, and two
        additions or products of the size of lse.
        """
        e = self.precision.sum_unit
        keys = self.k.shape[-2]
        moved = self.score_error.sum(axis=-1)
        return moved + e * (np.sqrt(keys) + 4) + 2 * e * np.abs(self.lse_ref)

    def gradients(self):
        """Return the errors of dq, dk and dv, one an element each."""
        u, f, e = self.precision
        p, q, k, v, dout = self.p, self.q, self.k, self.v, self.dout
        swap = np.swapaxes
        keys, dv_dim = self.k.shape[-2], self.v.shape[-1]

        out = p @ v
        dp = dout @ swap(v, -1, -2)
        delta = (dout * out).sum(axis=-1, keepdims=True)
        sums = e * (np.sqrt(dv_dim) + 2)
        dp_error = sums * (np.abs(dout) @ swap(np.abs(v), -1, -2))
        # The errors of out have the factor 3 in them already.
        delta_error = np.sqrt(
            (dout**2 * (self.out() / 3 + u * np.abs(out)) ** 2).sum(
                axis=-1, keepdims=True
            )
        ) + sums * (np.abs(dout) * np.abs(out)).sum(axis=-1, keepdims=True)

        ds = p * (dp - delta)
        a = np.sqrt(
            (self.w * (dp - delta)) ** 2 + (p * dp_error) ** 2 + (u * ds) ** 2
        )
        dq = np.sqrt(a**2 @ k**2) + delta_error * np.abs(p @ k)
        dk2 = swap(a**2 + (p * delta_error) ** 2, -1, -2) @ q**2
        dv2 = swap(self.w**2, -1, -2) @ dout**2

        many = e * np.sqrt(keys)
        dq = 3 * dq + many * (np.abs(ds) @ np.abs(k)) + u * np.abs(ds @ k)
        dq = np.abs(self.scale) * (dq + f * lost(k)) + f
        dk = self._of_keys(dk2, ds, q, self.scale)
        return dq, dk, self._of_keys(dv2, p, dout, 1.0)

    def _of_keys(self, squares, weights, rows, scale):
        """Errors of weights^T rows, summed over a group of query heads."""
        u, f, e = self.precision
        weights = weights.swapaxes(-1, -2)
        group = self.q.shape[1] // max(self.heads_kv, 1)
        many = e * np.sqrt(self.q.shape[-2] * group)
        spread = np.sqrt(sum_groups(squares, self.heads_kv))
        size = sum_groups(np.abs(weights) @ np.abs(rows), self.heads_kv)
        value = sum_groups(weights @ rows, self.heads_kv)
        error = 3 * spread + many * size + u * np.abs(value)
        error = error + f * sum_groups(lost(rows), self.heads_kv)
        return np.abs(scale) * error + f


def lost(rows):
    """What a product loses, in units of f, if every weight loses f."""
    return np.abs(rows).sum(axis=-2, keepdims=True)


def finite(array):
    """Return float64, with 0 where the array is not finite."""
    array = np.asarray(array, np.float64)
    return np.where(np.isfinite(array), array, 0.0)
