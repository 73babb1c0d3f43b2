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
    softcap: tanh, division and product       6 e |s|, see below
    slope and bias, added                     4 e (|s| + |added|)

and absolutely f, for what is subnormal in the dtype or flushed; all of one
sign, so these just add up.

Sums of n float32 terms carry e sqrt(n) times the sum of magnitudes: each
addition rounds its partial sum, signs at random. In a product, errors w_j
of n terms come together as ``sqrt(sum w_j^2)``. We allow three times that:
sqrt(9), so it is the worst case for up to nine terms (Cauchy and Schwarz);
beyond, where errors are uniform in +-w and have standard deviation
w / sqrt(3), it is 5.2 deviations.

tanh(x) of 16-bit kernels is 1 - 2 / (exp(2x) + 1): absolutely 8 e from the
exponential (4 e) and the rest, and so 8 e cap where the library's function is
6 e |s|. With a cap above 128 they call that function, or a polynomial that is
27 e |s| off with its roundings (tests/unit/test_softcap.py). The slope of a
softcap, 1 - t^2, is off by 2 t times the error of t.

Gradients: delta comes from the rounded out, with the error of out itself, and
subtracting dlse rounds once more: one error for a whole row, so it enters dq
through ``|P K|`` and not through a root of squares.
"""

import numpy as np

from cuflash.reference.scores import reduce_to_shape

from .dtypes import PRECISION
from .heads import heads_first, sum_groups

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
    terms : options.Terms
    exact_scores : bool
        The test made q and k so that every float32 score is exact.
    """

    def __init__(self, dout, q, k, v, lse, terms, *, scale, exact_scores):
        self.heads_kv = k.shape[2]
        self.precision = PRECISION[q.dtype.name]
        self.scale = scale
        heads = q.shape[2]
        self.dout, self.q, self.k, self.v = (
            None if x is None else heads_first(finite(x), heads)
            for x in (dout, q, k, v)
        )
        self.terms = terms
        self.exact_scores = exact_scores
        self.lse_ref = finite(lse)
        self._probabilities(self.lse_ref)

    def _probabilities(self, lse):
        u, f, e = self.precision
        d = self.q.shape[-1]
        products = self.q @ self.k.swapaxes(-1, -2) * self.scale
        s = self.terms.score(products)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        if self.terms.sink is not None:
            m = np.maximum(m, self.terms.sink)
        m = np.where(m == -np.inf, 0, m)
        total = np.exp(s - m).sum(axis=-1, keepdims=True)
        self.p, self.p_sink = self.terms.softmax(s)
        s = np.where(self.p > 0, s, 0)  # errors of no weight do not count

        magnitude = np.abs(self.q) @ np.abs(self.k).swapaxes(-1, -2)
        delta = e * np.sqrt(d) * np.abs(self.scale) * magnitude
        delta += self._of_steps(products, delta)
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
        self.slope = self.terms.slope(products)

    def _of_steps(self, products, error):
        """Errors of scores by softcap and additions; of the slope too."""
        u, f, e = self.precision
        self.slope_error = 0.0
        steps = 4 * e * np.abs(self.terms.added)
        if self.terms.softcap is not None:
            cap, sixteen_bits = self.terms.softcap, u > e
            t = np.abs(np.tanh(products / cap))
            of_t = 6 * e * t
            if sixteen_bits:
                of_t = 8 * e if cap <= 128 else 27 * e * t
            steps = steps + cap * of_t
            moved = self.terms.slope(products) * error / cap
            self.slope_error = 2 * t * (of_t + moved) + 2 * e
        if self.terms.added.any() or self.terms.softcap is not None:
            steps = steps + 4 * e * np.abs(products)
        return steps

    def out(self):
        """Return the errors of out, one per element."""
        u, f, e = self.precision
        w = self.w * self.terms.z
        out = (self.p * self.terms.z) @ self.v
        keys = self.k.shape[-2]
        row = (self.w**2).sum(axis=-1, keepdims=True)
        return (
            3 * np.sqrt(w**2 @ self.v**2 + row * out**2)
            + (u + e * (np.sqrt(keys) + 4)) * np.abs(out)
            + f * (1 + lost(self.v))
        )

    def lse(self):
        """Return the errors of lse, one per row.

        An error of a score moves lse by P times it. Then the sum of
        weights (relative to which log is absolute), log itself, and two
        additions or products of the size of lse.
        """
        e = self.precision.sum_unit
        keys = self.k.shape[-2]
        moved = self.score_error.sum(axis=-1)
        return moved + e * (np.sqrt(keys) + 4) + 2 * e * np.abs(self.lse_ref)

    def gradients(self, bias=None, dlse=None):
        """Return the errors of dq, dk and dv, one per element.

        Then of dbias, if there is one, and of dsink.
        """
        u, f, e = self.precision
        p, q, k, v, dout = self.p, self.q, self.k, self.v, self.dout
        z, swap = self.terms.z, np.swapaxes
        keys, dv_dim = self.k.shape[-2], self.v.shape[-1]

        out = (p * z) @ v
        dp = z * (dout @ swap(v, -1, -2))
        delta = (dout * out).sum(axis=-1, keepdims=True)
        sums = e * (np.sqrt(dv_dim) + 2)
        dp_error = z * sums * (np.abs(dout) @ swap(np.abs(v), -1, -2))
        # The errors of out have the factor 3 in them already.
        delta_error = np.sqrt(
            (dout**2 * (self.out() / 3 + u * np.abs(out)) ** 2).sum(
                axis=-1, keepdims=True
            )
        ) + sums * (np.abs(dout) * np.abs(out)).sum(axis=-1, keepdims=True)

        if dlse is not None:
            delta = delta - finite(dlse)[..., None]
            delta_error = delta_error + e * np.abs(delta)
        ds_bias = p * (dp - delta)
        a = np.sqrt(
            (self.w * (dp - delta)) ** 2
            + (p * dp_error) ** 2
            + (u * ds_bias) ** 2
        )
        others = []
        if bias is not None:
            others.append(self._of_bias(a, p * delta_error, ds_bias, bias))
        if self.terms.sink is not None:
            others.append(self._of_sink(delta, delta_error))

        p, ds = p * self.slope, ds_bias * self.slope
        a = np.sqrt((a * self.slope) ** 2 + (ds_bias * self.slope_error) ** 2)
        dq = np.sqrt(a**2 @ k**2) + delta_error * np.abs(p @ k)
        dk2 = swap(a**2 + (p * delta_error) ** 2, -1, -2) @ q**2
        dv2 = swap((self.w * z) ** 2, -1, -2) @ dout**2

        many = e * np.sqrt(keys)
        dq = 3 * dq + many * (np.abs(ds) @ np.abs(k)) + u * np.abs(ds @ k)
        dq = np.abs(self.scale) * (dq + f * lost(k)) + f
        dk = self._of_keys(dk2, ds, q, self.scale)
        dv = self._of_keys(dv2, self.p * z, dout, 1.0)
        return dq, dk, dv, *others

    def _of_bias(self, errors, of_delta, ds, bias):
        """Errors of sums of dS over the axes that bias lacks."""
        u, f, e = self.precision
        count = ds.size / max(bias.size, 1)
        spread = np.sqrt(reduce_to_shape(errors**2 + of_delta**2, bias.shape))
        size = reduce_to_shape(np.abs(ds), bias.shape)
        value = np.abs(reduce_to_shape(ds, bias.shape))
        return 3 * spread + e * np.sqrt(count) * size + u * value + f * count

    def _of_sink(self, delta, delta_error):
        """Errors of sums of P D over batches and rows."""
        _, f, e = self.precision
        terms = np.abs(self.p_sink * delta)
        rows = delta[:, 0].size
        # exp(sink - lse): lse is off by its own error, and rounded.
        of_lse = self.lse() + 2 * e * np.abs(self.lse_ref) + 8 * e
        error = of_lse[..., None] * terms + self.p_sink * delta_error
        spread = np.sqrt((error**2).sum(axis=(0, 2, 3)))
        return (
            3 * spread
            + (e * np.sqrt(rows) + e) * terms.sum(axis=(0, 2, 3))
            + f
        )

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
    """The error of a matmul in units of f, if every weight has error f."""
    return np.abs(rows).sum(axis=-2, keepdims=True)


def finite(array):
    """Return float64, with 0 where the array is not finite."""
    array = np.asarray(array, np.float64)
    return np.where(np.isfinite(array), array, 0.0)
