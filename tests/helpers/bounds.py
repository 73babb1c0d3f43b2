"""Exact results, and the worst-case errors of docs/guide/accuracy.md.

Unlike `rounding`, which allows what rounding at random comes to, these bounds
hold for every input, to first order, element by element. Rows of keys see a
query each, so there is no -inf in lse. Arrays are (batch, heads, rows,
columns), with as many key heads as query heads, in a dtype finer than the
call's: `exact` is as good as that dtype is.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .heads import visible

EXP = 4  # of exp and exp2, in u: 2 ulp
PER_TILE = 6  # roundings of sums that each tile of keys adds
SMALLEST_BLOCK = 16  # keys of the smallest tile
WIDE, SMALLEST_WIDE_BLOCK = 192, 4  # the same of head dimensions above that


class Arithmetic(NamedTuple):
    """The relative errors of an arithmetic's operations.

    unit : rounding to nearest, u.
    step : one term of a product of matrices, relative to the sum of all
        terms' magnitudes: u by multiply-adds. For eight terms in parts
        there are three sums by tensor cores, of 16 truncations, which are
        2u each (test_ptx_tf32).
    split : operands written as sums of parts, relative to the same.
    """

    unit: float
    step: float
    split: float = 0.0

    def product(self, length):
        """Return the relative error of a sum of that many products."""
        return length * self.step + self.split


ARITHMETIC = {
    "float32": Arithmetic(2.0**-24, 2.0**-24),
    "float64": Arithmetic(2.0**-53, 2.0**-53),
    "tf32x3": Arithmetic(2.0**-24, 3 * 16 * 2.0**-23 / 8, 2.0**-21),
}


def exact(dout, q, k, v, *, scale, causal):
    """Return every matrix of attention and of its gradient."""
    x = SimpleNamespace(dout=dout, q=q, k=k, v=v, scale=scale)
    see = visible(q.shape[-2], k.shape[-2], causal)
    s = q @ turned(k) * scale
    masked_scores = np.where(see, s, -np.inf)
    x.m = masked_scores.max(axis=-1, keepdims=True)
    weights = np.exp(masked_scores - x.m)
    total = weights.sum(axis=-1, keepdims=True)
    x.s, x.p = np.where(see, s, 0), weights / total
    x.lse = (x.m + np.log(total))[..., 0]
    x.out = x.p @ v
    x.part = dout @ turned(v) - (dout * x.out).sum(axis=-1, keepdims=True)
    x.ds = scale * x.p * x.part
    x.dq, x.dk, x.dv = x.ds @ k, turned(x.ds) @ q, turned(x.p) @ dout
    return x


def bounds(x, arithmetic):
    """Return the bounds of out, lse, dq, dk and dv of `exact` matrices."""
    return results(every_bound(x, arithmetic))


def every_bound(x, arithmetic, wide=WIDE):
    """Return the bounds of all that leads to the five results, and theirs.

    By the names of `exact`, and of the page: weight (epsilon), row (E),
    sums (nu), eta, dp (pi), delta. ds is tau.

    wide : head dimensions above it have the smaller tiles.
    """
    y, u = SimpleNamespace(), arithmetic.unit
    product, size = arithmetic.product, np.abs
    keys = x.k.shape[-2]
    is_wide = max(x.q.shape[-1], x.v.shape[-1]) > wide
    tiles = -(-keys // (SMALLEST_WIDE_BLOCK if is_wide else SMALLEST_BLOCK))
    y.sums = product(keys) + PER_TILE * tiles * u
    score = product(x.q.shape[-1]) * size(x.scale)
    score = score * (size(x.q) @ turned(size(x.k)))

    y.weight = score + 6 * u * (size(x.s) + size(x.m)) + EXP * u
    y.row = (x.p * y.weight).sum(axis=-1, keepdims=True)
    y.out = (x.p * y.weight) @ size(x.v) + y.sums * (x.p @ size(x.v))
    y.out += (y.row + y.sums + 2 * u) * size(x.out)
    y.lse = y.row[..., 0] + y.sums
    y.lse += 4 * u * (size(x.lse) + size(x.m[..., 0]))

    # P of the gradients is exp(S - lse), with the errors of lse in it.
    row = x.lse[..., None]
    y.eta = score + y.lse[..., None] + EXP * u
    y.eta += 3 * u * (size(x.s) + size(row) + size(x.s - row))
    columns = product(x.v.shape[-1])
    y.delta = (size(x.dout) * (y.out + columns * size(x.out))).sum(
        axis=-1, keepdims=True
    )
    y.dp = columns * (size(x.dout) @ turned(size(x.v)))
    y.ds = (y.eta + 5 * u) * size(x.ds)
    y.ds += size(x.scale) * x.p * (y.dp + y.delta)
    y.dq = y.ds @ size(x.k) + y.sums * (size(x.ds) @ size(x.k))
    queries = product(x.q.shape[-2]) + u
    y.dk = turned(y.ds) @ size(x.q) + queries * (
        turned(size(x.ds)) @ size(x.q)
    )
    y.dv = turned(x.p * (y.eta + queries)) @ size(x.dout)
    return y


def results(x):
    """Return out, lse, dq, dk and dv of exact matrices, or of bounds."""
    return x.out, x.lse, x.dq, x.dk, x.dv


def turned(x):
    return np.swapaxes(x, -1, -2)
