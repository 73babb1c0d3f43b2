r"""`tiny`: how far rounding alone may move each element of a result.

An error may be ``factor * max|low - ref|`` of its row, or `tiny` (compare.py).
`low` can be right by luck: with one key P is 1, and with a handful of
elements some roundings are exact. `tiny` is what the first-order errors of
an exact algorithm come to, so that luck cannot turn right results red.

Write u for `Precision.unit`, f for `floor` and e for `sum_unit` of the
dtype. Per pair (i, j), relative errors of a probability:

    P rounded to the dtype, for all products            u
    score, a float32 sum of head_dim terms              `of_sums`, times scale
    scaling, shift by m, argument of exp2               e (|s| + 2 |s - m|)
    exp2 itself, 2 ulp                                  2 e
    softcap: tanh, division and product                 6 e |s|, see below
    slope and bias, added                               4 e (|s| + |added|)

and absolutely f, for what is subnormal in the dtype or flushed; all of one
sign, so these just add up. So do the errors of P below 2^-400, whose squares
a float64 may not hold: where all rows that see a key have such weights, dk and
dv consist of them.

Errors w_j of signs at random come together as ``sqrt(sum w_j^2)``, over keys
in out and dq, over queries in dk and dv. We allow three times that: sqrt(9),
so it is the worst case for up to nine terms (Cauchy and Schwarz); beyond,
where errors are uniform in +-w and have standard deviation w / sqrt(3), it is
5.2 deviations.

Sums of n terms in float32: each addition rounds its partial sum, by at most e
of it; `of_sums` is the root of the squares. Partial sums are at most the sum
of magnitudes, which will do for 16-bit types, whose u is far larger than e.
For others it knows the partial sums at quarters, from either end, and takes
the terms between to be in no order. A sum of n terms in no order, whose
squares add up to Q, strays from a straight line to its total by n Q / 6 in the
sum of squares (the mean over all orders).

Errors that all keys of a row share do not come together as a root. In dq they
enter whole:

    lse, as the forward pass rounds it: its bound below,  times |dS K|
        and e |lse - m|, where it stands for m
    delta = rowsum(dO * out) of the rounded out           times |P K|

An error w_j of P moves delta by w_j (dP_j - delta), through out.

The roundings of exp(S - m) and of out are no errors at random: rows with the
same weights, as all rows that see one key alone have, have the same. They move
delta by rowsum(dO * (rounded out - out)), with a sign; what that comes to in
dk, dbias and dsink is computed, and enters whole beside the roots. The weights
may be rounded (16-bit kernels with dropout round 1 / (1 - p)) or not: the
larger of the two. So do keys of a row whose weights are alike within a unit of
the dtype: in out, what the roundings of exp(S - m) come to is computed too,
and enters whole beside the roots of the others, if that is larger than the
root of all. In dq that is done of the roundings of P and dS (`_of_alike`).

A weight exp(S - m) that is flushed is so before dropout multiplies it by z:
P z is f z off. float16, whose f is a rounding, rounds P z.

`truncates`: tensor cores that sum floats in parts lose towards zero, which
does not cancel (`_lost_by_sums`). What that comes to on average, with its
sign, is computed for each product of matrices and enters whole; lse may be
that of such sums, or exact: the larger of the two. A loss differs from its
average at random, by less than the additions' roundings above.

`integers`: dq is a sum of integers, see `_of_grid`.

tanh(x) of 16-bit kernels is 1 - 2 / (exp(2x) + 1): absolutely 8 e from the
exponential (4 e) and the rest, and so 8 e cap where the library's function is
6 e |s|. With a cap above 128 they call that function, or a polynomial that is
27 e |s| off with its roundings (tests/unit/test_softcap.py). The slope of a
softcap, 1 - t^2, is off by 2 t times the error of t.
"""

import numpy as np

from cuflash.reference.scores import reduce_to_shape

from .dtypes import PRECISION, lse_dtype
from .heads import heads_first, sum_groups

# Errors of relative size beyond this are no longer of first order, and a
# bound made of them would hide faults. Such tests must use exact scores.
LARGEST_RELATIVE = 2.0**-4

SMALLEST_SQUARED = 2.0**-400  # with errors of 2^-52, squares are normal

# What tf32x3 leaves out of a product (docs/guide/accuracy.md): three parts of
# at most 2^-22, 2^-23 and 2^-23, of which this is the root of squares, in e.
PARTS = 6**0.5

MMA_TERMS = 8  # products of tf32 that one MMA adds to a sum
# Keys of tf32x3's largest forward tile, and rows of its largest backward tile:
# where sums on tensor cores begin anew.
FORWARD_TILE, BACKWARD_TILE = 64, 128
# Keys of the smallest tile of wgmma's backward pass, and the steps in what no
# row of dq / scale exceeds: sm90/integer_dq.cuh.
SMALLEST_DQ_TILE, DQ_STEPS = 64, 2.0**29


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
    truncates : bool
        Sums of float32 are those of precision "tf32x3".
    integers : bool
        Sums of dq may be integers.
    """

    def __init__(
        self, dout, q, k, v, lse, terms, *, scale, exact_scores,
        truncates=False, integers=False,
    ):  # fmt: skip
        self.truncates, self.integers = truncates, integers
        self.heads_kv, self.dtype = k.shape[2], q.dtype
        self.precision = PRECISION[q.dtype.name]
        self.parts = PARTS if q.dtype == np.float32 else 0
        self.rounds_products = q.dtype == np.float16
        self.scale = scale
        heads = q.shape[2]
        self.dout, self.q, self.k, self.v = (
            None if x is None else heads_first(finite(x), heads)
            for x in (dout, q, k, v)
        )
        self.terms = terms
        self.lse_ref = finite(lse)
        self._probabilities(exact_scores)

    def _probabilities(self, exact_scores):
        u, f, e = self.precision
        products = self.q @ turned(self.k) * self.scale
        s = self.terms.score(products)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        if self.terms.sink is not None:
            m = np.maximum(m, self.terms.sink)
        m = np.where(m == -np.inf, 0, m)
        total = np.exp(s - m).sum(axis=-1, keepdims=True)
        self.p, self.p_sink = self.terms.softmax(s)
        self.weights = np.exp(s - m)
        s = np.where(self.p > 0, s, 0)  # errors of no weight do not count

        delta = np.abs(self.scale) * self.of_sums(self.q, turned(self.k))
        delta += self._of_steps(products, delta)
        delta += e * (np.abs(s) + 2 * np.abs(s - m))
        if exact_scores:
            # The row's maximum less itself is 0, and lse is m if it is alone.
            delta = np.where(s == m, 0, 4 * e * (np.abs(s) + np.abs(m)))
        delta = np.where(self.p > 0, delta, 0)
        self.of_scores = delta
        self.score_error, self.m = self.p * delta, m[..., 0]
        # Backward, lse stands in place of m.
        row = self._lse_at_random() + e * np.abs(self.lse_ref - self.m)
        self.row = np.where((total == 1) & exact_scores, 0, row[..., None])
        if self.dout is not None:
            largest = (self.score_error + self.p * self.row).max(initial=0)
            assert largest < LARGEST_RELATIVE, "use exact scores"
        self.w = self.score_error + 2 * e * self.p  # in float32
        self.w_stored = self.w + u * self.p
        self.slope = self.terms.slope(products)
        self._truncate()

    def _truncate(self):
        """Average changes of scores, of lse and of out, with signs."""
        self.moved_s = self.moved_lse = np.zeros((1, 1))
        self.moved_out = 0.0
        if not self.truncates:
            return
        moved = self.scale * self._lost_by_sums(self.q, turned(self.k))
        self.moved_s = np.where(self.p > 0, self.slope * moved, 0)
        self.moved_lse = (self.p * self.moved_s).sum(axis=-1, keepdims=True)
        kept = self.p * self.terms.z
        self.moved_out = (kept * (self.moved_s - self.moved_lse)) @ self.v
        self.moved_out += self._lost_by_sums(kept, self.v, FORWARD_TILE)

    def _lost_by_sums(self, a, b, length=None):
        """Return what tensor cores change in a @ b on average, with signs.

        An MMA of eight terms cuts each product, and the sum before it, below a
        quarter of the sum's last bit, and then their sum below that bit
        (docs/guide/accuracy.md). On average a product loses 1/8 of the bit, by
        its own sign, and the sum 3/8 by its. The two MMAs of lower parts lose
        3/8 each: their products are of either sign.

        length : of sums, if others than the tensor cores add them up.
        """
        if not self.truncates:
            return 0.0
        lost_here = np.zeros((*a.shape[:-1], b.shape[-1]))
        total = np.zeros_like(lost_here)
        for i in range(0, a.shape[-1], MMA_TERMS):
            if length is not None and i % length == 0:
                total[:] = 0
            x, y = a[..., i : i + MMA_TERMS], b[..., i : i + MMA_TERMS, :]
            before = np.abs(total)
            total += x @ y
            largest = np.maximum(before, np.abs(total))
            last_bit = np.ldexp(2.0**-24, np.frexp(largest)[1])
            terms = np.sign(x) @ np.sign(y)
            lost_here -= last_bit * (9 / 8 * np.sign(total) + terms / 8)
        return lost_here

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

    def of_sums(self, a, b):
        """Return the root of the squared roundings of a @ b in float32."""
        u, _, e = self.precision
        n = a.shape[-1]
        if u > e:
            return e * np.sqrt(n) * (np.abs(a) @ np.abs(b))
        edges = np.linspace(0, n, min(n, 4) + 1).astype(int)
        partial = [np.zeros((*a.shape[:-1], b.shape[-1]))]
        for i, j in zip(edges, edges[1:], strict=False):
            partial.append(partial[-1] + a[..., i:j] @ b[..., i:j, :])
        ahead = sum(x**2 for x in partial[1:])
        behind = sum((partial[-1] - x) ** 2 for x in partial[:-1])
        squares = n / max(len(partial) - 1, 1) * np.maximum(ahead, behind)
        return e * np.sqrt(squares + (n / 6 + self.parts**2) * (a**2 @ b**2))

    def out(self):
        """Return the errors of out, one per element."""
        u, f, e = self.precision
        p, z = self.p, self.terms.z
        out = (p * z) @ self.v
        row = (self.w**2).sum(axis=-1, keepdims=True)
        others = row * out**2 + self.of_sums(p * z, self.v) ** 2
        spread = (self.w_stored * z) ** 2 @ self.v**2 + others
        of_weights = 3 * np.sqrt(spread)
        if u > e:
            in_float = (self.w * z) ** 2 @ self.v**2 + others
            alike = np.abs(self._change() @ self.v)
            of_weights = np.maximum(of_weights, 3 * np.sqrt(in_float) + alike)
        keys = self.k.shape[-2]
        return (
            of_weights
            + np.abs(self.moved_out)
            + (u + e * (np.sqrt(keys) + 4)) * np.abs(out)
            + f
            + self._lost_products() @ np.abs(self.v)
        )

    def _lost_products(self):
        """What P z loses below the dtype's normal numbers."""
        z = np.broadcast_to(self.terms.z, self.p.shape)
        return self.precision.floor * (z > 0 if self.rounds_products else z)

    def lse(self):
        """Return the errors of lse, one per row."""
        return self._lse_at_random() + np.abs(self.moved_lse[..., 0])

    def max_score(self):
        """Return the errors of the largest score, one per row.

        The largest of some numbers moves no further than the one of them that
        moves most: by three times the root of squares, as above, and by what
        tensor cores cut off. Keys without weight are too far below to count.
        A product, the scale and a score may be flushed.
        """
        moved = 3 * self.of_scores + np.abs(self.moved_s)
        sizes = np.abs(self.q) @ turned(np.abs(self.k))
        flushed = 1 + self.q.shape[-1] * np.abs(self.scale) + sizes
        moved = moved + np.finfo(lse_dtype(self.dtype)).tiny * flushed
        return moved.max(axis=-1, initial=0)

    def _lse_at_random(self):
        """The same but for what tensor cores cut off.

        An error of a score moves lse by P times it. Then the sum of
        weights (relative to which log is absolute), log itself, and two
        additions or products of the size of lse, two of the size of m.
        """
        e, keys = self.precision.sum_unit, self.k.shape[-2]
        moved = 3 * np.sqrt((self.score_error**2).sum(axis=-1))
        moved = np.minimum(moved, self.score_error.sum(axis=-1))
        steps = np.sqrt(keys) + 4 + 2 * np.abs(self.lse_ref) + np.abs(self.m)
        return moved + e * steps

    def gradients(self, bias=None, dlse=None):
        """Return the errors of dq, dk and dv, one per element.

        Then of dbias, if there is one, and of dsink.
        """
        u, f, e = self.precision
        p, q, k, v, dout = self.p, self.q, self.k, self.v, self.dout
        z = self.terms.z

        out = (p * z) @ v
        dp = z * (dout @ turned(v))
        delta = (dout * out).sum(axis=-1, keepdims=True)
        self.delta_error = self._of_delta(dp, delta, out)
        self.delta_moved = self._of_rounded(out)
        if dlse is not None:
            delta = delta - finite(dlse)[..., None]
            self.delta_error = self.delta_error + e * np.abs(delta)
        ds_bias = p * (dp - delta)
        dp_error = z * self.of_sums(dout, turned(v))
        dp_error += 2 * e * np.abs(dp - delta)
        pairs = np.sqrt(
            (self.w_stored * (dp - delta)) ** 2
            + (p * dp_error) ** 2
            + (u * ds_bias) ** 2
        )
        # What P and dS lose below the dtype's normal numbers.
        small = np.where(p < SMALLEST_SQUARED, p, 0)
        lost_p = np.where(self.terms.see, f * np.ones_like(p), 0)
        small_p = np.where(small, self.w_stored + p * self.row, 0)
        lost_kept = np.where(self.terms.see, self._lost_products(), 0)
        lost_kept += small_p * z
        lost_p += small_p
        lost_ds = lost_p * (1 + np.abs(dp - delta))
        lost_ds += small * (dp_error + self.delta_error)
        lost_ds += small * np.abs(dp - delta) * (u + self.slope_error)
        truncated = self._of_truncated(dp, delta)
        others = []
        if bias is not None:
            error = self._of_bias(pairs, ds_bias, lost_ds, bias)
            error += _largest(
                reduce_to_shape(x, bias.shape) for _, x in truncated
            )
            others.append(error)
        if self.terms.sink is not None:
            others.append(self._of_sink(delta))

        moved_p = [x for x, _ in truncated]
        moved_ds = [x * self.slope for _, x in truncated]
        p, ds = p * self.slope, ds_bias * self.slope
        slopes = (ds_bias * self.slope_error) ** 2
        in_float = (self.w * (dp - delta)) ** 2 + (self.p * dp_error) ** 2
        in_float = in_float * self.slope**2 + slopes
        pairs = np.sqrt((pairs * self.slope) ** 2 + slopes)
        sums = self.of_sums(ds, k) ** 2
        dq = 3 * np.sqrt(pairs**2 @ k**2 + sums)
        if u > e:
            alike = self._of_alike(dp - delta, ds_bias)
            dq = np.maximum(dq, 3 * np.sqrt(in_float @ k**2 + sums) + alike)
        dq += 3 * self.delta_error * np.abs(p @ k)
        dq += (self.row + u + 2 * e) * np.abs(ds @ k)
        of_sums = self._lost_by_sums(ds, k, BACKWARD_TILE)
        dq += _largest(x @ k + of_sums for x in moved_ds)
        dq += self._of_grid(delta)
        dq = np.abs(self.scale) * (dq + lost_ds @ np.abs(k)) + f
        rows = pairs**2 + (p * self.delta_error) ** 2 + (self.row * ds) ** 2
        moved = [p * x + y for x in self.delta_moved for y in moved_ds or [0]]
        dk = self._of_keys(rows, ds, q, self.scale, lost_ds, moved)
        rows = (self.w_stored + p * self.row) * z
        dv = self._of_keys(rows**2, self.p * z, dout, 1.0, lost_kept, moved_p)
        return dq, dk, dv, *others

    def _of_truncated(self, dp, delta):
        """Average changes of P z and of dS by sums that tensor cores cut.

        Two pairs of arrays: given an exact lse and out, and given those of
        such sums, in which what the scores of a row have in common cancels.
        """
        if not self.truncates:
            return []
        z = self.terms.z
        of_dp = z * self._lost_by_sums(self.dout, turned(self.v))
        of_delta = (self.dout * self.moved_out).sum(axis=-1, keepdims=True)
        changes = [
            (self.p * self.moved_s, 0.0),
            (self.p * (self.moved_s - self.moved_lse), of_delta),
        ]
        return [
            (x * z, x * (dp - delta) + self.p * (of_dp - y))
            for x, y in changes
        ]

    def _of_grid(self, delta):
        """Errors of dq / scale by the grid of integer sums.

        A part from each key tile is rounded to half a step. Steps are at most
        2^-29 of what the row cannot exceed (sm90/integer_dq.cuh):
        (z |dO_i| max|V_j| + |delta_i|) max|K_jc|, times what weights may
        exceed 1 by (prepare/row_grids.cuh).
        """
        if not self.integers:
            return 0.0
        dout, v = (np.sqrt((x**2).sum(-1, keepdims=True)) for x in (
            self.dout, self.v
        ))  # fmt: skip
        largest = {"axis": (-2, -1), "keepdims": True, "initial": 0.0}
        z = np.max(self.terms.z, initial=1.0)
        limit = z * dout * v.max(**largest) + np.abs(delta)
        limit = limit * np.abs(self.k).max(**largest)
        limit = limit * np.exp2(2.0**-20 * np.abs(self.lse_ref))[..., None]
        tiles = -(-self.k.shape[-2] // SMALLEST_DQ_TILE)
        return min(tiles, 3 * np.sqrt(tiles)) / 2 * limit / DQ_STEPS

    def _of_rounded(self, out):
        """By how much delta is off, with signs, by rounded weights and out.

        Two arrays: if out alone is rounded, and if both are.
        """
        return [
            (self.dout * (self._stored(x) - out)).sum(axis=-1, keepdims=True)
            for x in (out, out + self._change() @ self.v)
        ]

    def _of_alike(self, x, ds):
        """By how much dq / scale moves if equal pairs are rounded alike.

        x : dP - delta; delta may be that of the rounded out. Kernels make dS
        of P in float32 or as it is stored.
        """
        changes = (
            self._stored(p * (x - moved)) - ds
            for p in (self.p, self._stored(self.p))
            for moved in (0, *self.delta_moved)
        )
        return _largest((y * self.slope) @ self.k for y in changes)

    def _change(self):
        """By how much rounding exp(S - m) z changes P z, with signs."""
        kept = self.weights * self.terms.z
        return (self._stored(kept) - kept) * _ratio(self.p, self.weights)

    def _stored(self, x):
        return finite(x.astype(self.dtype))

    def _of_delta(self, dp, delta, out):
        """Errors of delta, roots of squares, one per row.

        Each rounding of P, of the row's sum, of an element of out and of the
        sum that it is; the sum of their products with dO.
        """
        u, f, e = self.precision
        squares = (self.w_stored * dp) ** 2 + (self.w * delta) ** 2
        squares = squares.sum(axis=-1, keepdims=True)
        sums = self.of_sums(self.p * self.terms.z, self.v)
        columns = self.dout**2 * ((u * out) ** 2 + sums**2)
        squares = squares + columns.sum(axis=-1, keepdims=True)
        # As a matrix product of rows with themselves, one column each.
        ones = np.ones((out.shape[-1], 1))
        squares += self.of_sums(self.dout * out, ones) ** 2
        lost_here = f + self._lost_products() @ np.abs(self.v)
        lost_here = np.abs(self.dout) * lost_here
        keys = self.k.shape[-2]
        return (
            np.sqrt(squares)
            + e * (np.sqrt(keys) + 4) * np.abs(delta)
            + lost_here.sum(axis=-1, keepdims=True)
        )

    def _of_bias(self, pairs, ds, lost_ds, bias):
        """Errors of sums of dS over the axes that bias lacks."""
        u, f, e = self.precision
        count = ds.size / max(bias.size, 1)  # of a sum's terms
        shared = [self.p * self.delta_error, ds * self.row]
        if bias.shape[-1] == 1:  # a row's keys share them
            shared = [x.sum(axis=-1, keepdims=True) for x in shared]
        spread = reduce_to_shape(pairs**2, bias.shape)
        for x in shared:
            spread = spread + reduce_to_shape(x**2, bias.shape)
        size = reduce_to_shape(np.abs(ds), bias.shape)
        value = np.abs(reduce_to_shape(ds, bias.shape))
        error = 3 * np.sqrt(spread) + e * np.sqrt(count) * size
        error += _largest(
            reduce_to_shape(self.p * x, bias.shape) for x in self.delta_moved
        )
        under = reduce_to_shape(lost_ds, bias.shape)
        return error + u * value + under + f

    def _of_sink(self, delta):
        """Errors of sums of P D over batches and rows."""
        _, f, e = self.precision
        terms = np.abs(self.p_sink * delta)
        rows = delta[:, 0].size
        # exp(sink - lse): lse is off by its own error, and rounded.
        of_lse = self.lse() + 2 * e * np.abs(self.lse_ref) + 8 * e
        error = of_lse[..., None] * terms + self.p_sink * self.delta_error
        spread = np.sqrt((error**2).sum(axis=(0, 2, 3)))
        moved = _largest(
            (self.p_sink * x).sum(axis=(0, 2, 3)) for x in self.delta_moved
        )
        return (
            3 * spread
            + moved
            + (e * np.sqrt(rows) + e) * terms.sum(axis=(0, 2, 3))
            + f
        )

    def _of_keys(self, squares, weights, rows, scale, lost_pairs, moved=()):
        """Errors of weights^T rows, summed over a group of query heads.

        squares : of the errors of weights.
        lost_pairs : what weights lose below the normal numbers.
        moved : choices of errors of weights, with their signs.
        """
        u, f, e = self.precision
        sums = self.of_sums(turned(weights), rows) ** 2
        spread = turned(squares) @ rows**2 + sums
        value = turned(weights) @ rows
        under = turned(lost_pairs) @ np.abs(rows)
        of_sums = self._lost_by_sums(turned(weights), rows, BACKWARD_TILE)
        known = (turned(x) @ rows + of_sums for x in moved)
        known = _largest(sum_groups(x, self.heads_kv) for x in known)
        spread, value, under = (
            sum_groups(x, self.heads_kv) for x in (spread, value, under)
        )
        error = 3 * np.sqrt(spread) + (u + 2 * e) * np.abs(value) + under
        error += known
        return np.abs(scale) * error + f


def _largest(arrays):
    """Return the largest magnitudes of several arrays; 0 of none."""
    return np.max([np.abs(x) for x in arrays], axis=0, initial=0.0)


def _ratio(a, b):
    """Return a / b, and 0 where b is."""
    return np.divide(a, b, out=np.zeros(np.shape(a)), where=b > 0)


def turned(x):
    return np.swapaxes(x, -1, -2)


def finite(array):
    """Return float64, with 0 where the array is not finite."""
    array = np.asarray(array, np.float64)
    return np.where(np.isfinite(array), array, 0.0)
