"""The worst-case errors of docs/guide/accuracy.md.

They hold for every input, to first order, element by element. Arrays are
(batch, heads, rows, columns), with as many key heads as query heads. Names are
those of the page: weight (epsilon), row (E), sums (nu), eta, dp (pi), delta.

16-bit types: what tensor cores multiply is rounded to the dtype once: P and
dS, which may be made of the rounded P. So are the results. Sums are float32,
whose worst error of n terms is no more than n u though tensor cores truncate
("Long sums of 16-bit products").
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

EXP = 4  # of exp and exp2, in u: 2 ulp
PER_TILE = 6  # roundings of sums that each tile of keys adds
SMALLEST_BLOCK = 16  # keys of the smallest tile
WIDE, SMALLEST_WIDE_BLOCK = 192, 4  # the same of head dimensions above that
DERIVATIVES_WIDE = 64  # above it simt's tiles may have 4 keys in derivatives
# Steps in what no row of dq / scale exceeds, where dq is a sum of integers
# (sm90/integer_dq.cuh), and the keys of its smallest tile.
DQ_STEPS, DQ_KEYS = 2.0**29, 64


class Arithmetic(NamedTuple):
    """The relative errors of an arithmetic's operations.

    Attributes
    ----------
    unit : float
        Rounding to nearest, u.
    step : float
        One term of a product of matrices, relative to the sum of all terms'
        magnitudes: u by multiply-adds. For eight terms in parts there are
        three sums by tensor cores, of 16 truncations, which are 2u each
        (tests/emulator/test_ptx_tf32.py).
    split : float
        Operands written as sums of parts, relative to the same.
    stored : float
        Rounding what is stored as a 16-bit type; 0 for others.
    floor : float
        The error of a stored number too small for that.
    """

    unit: float
    step: float
    split: float = 0.0
    stored: float = 0.0
    floor: float = 0.0

    def product(self, length: int) -> float:
        """The relative error of a sum of that many products."""
        return length * self.step + self.split


ARITHMETIC = {
    "float32": Arithmetic(2.0**-24, 2.0**-24),
    "float64": Arithmetic(2.0**-53, 2.0**-53),
    "tf32x3": Arithmetic(2.0**-24, 3 * 16 * 2.0**-23 / 8, 2.0**-21),
}
SIXTEEN_BITS = {
    "float16": Arithmetic(2.0**-24, 2.0**-24, 0.0, 2.0**-11, 2.0**-25),
    "bfloat16": Arithmetic(2.0**-24, 2.0**-24, 0.0, 2.0**-8, 2.0**-126),
}

# What calls with options have besides, and its value without them:
# z, factors of dropout; steps, errors of scores that options add, in u;
# slope of the softcap and its error; what a sink adds to the error of a row.
PLAIN = dict(z=1.0, steps=0.0, slope=1.0, slope_error=0.0, sink_error=0.0)


def every_bound(
    x: SimpleNamespace,
    arithmetic: Arithmetic,
    wide: int = WIDE,
    group: int = 1,
) -> SimpleNamespace:
    """Bounds of exact matrices: all that leads to the results, and theirs.

    Parameters
    ----------
    x : namespace
        q, k, v, dout, scale; s and p, 0 where masked, m, lse, out, part
        (z dP - delta) and ds; the names of `PLAIN`, if they differ. Without
        dout, bounds of gradients are left out.
    arithmetic : Arithmetic
    wide : int
        Head dimensions above it have the smaller tiles.
    group : int
        Query heads whose dk and dv are added up afterwards.
    """
    x = SimpleNamespace(**{**PLAIN, **vars(x)})
    y, u, h, f = SimpleNamespace(), *_units(arithmetic)
    product, size = arithmetic.product, np.abs
    keys = x.k.shape[-2]
    is_wide = max(x.q.shape[-1], x.v.shape[-1]) > wide
    tiles = -(-keys // (SMALLEST_WIDE_BLOCK if is_wide else SMALLEST_BLOCK))
    y.sums = product(keys) + PER_TILE * tiles * u
    y.score = product(x.q.shape[-1]) * size(x.scale)
    y.score = y.score * (size(x.q) @ turned(size(x.k))) + u * x.steps

    y.weight = y.score + 6 * u * (size(x.s) + size(x.m)) + EXP * u
    y.row = (x.p * y.weight).sum(axis=-1, keepdims=True)
    y.row = y.row + u * x.sink_error
    # With dropout, 1 / (1 - p) is rounded too.
    stored = h if np.ndim(x.z) == 0 else 2 * h + u
    p = x.p * x.z
    y.out = (p * (y.weight + stored)) @ size(x.v) + y.sums * (p @ size(x.v))
    y.out += (y.row + y.sums + 2 * u + h) * size(x.out)
    y.out += f * ((p > 0) @ size(x.v) + 1)
    y.lse = y.row[..., 0] + y.sums
    y.lse += 4 * u * (size(x.lse) + size(x.m[..., 0]))
    # P of the gradients is exp(S - lse), with the errors of lse in it.
    row = x.lse[..., None]
    y.eta = y.score + y.lse[..., None] + EXP * u
    y.eta += 3 * u * (size(x.s) + size(row) + size(x.s - row))
    if x.dout is not None:
        _gradients(x, y, arithmetic, group)
    return y


def _gradients(
    x: SimpleNamespace, y: SimpleNamespace, arithmetic: Arithmetic, group: int
) -> None:
    """Add the bounds of dq, dk and dv, and of what leads to them."""
    u, h, f = _units(arithmetic)
    product, size = arithmetic.product, np.abs
    columns = product(x.v.shape[-1])
    dout, k, scale = size(x.dout), size(x.k), size(x.scale)
    y.delta = (dout * (y.out + columns * size(x.out))).sum(-1, keepdims=True)
    y.dp = columns * (dout @ turned(size(x.v)))
    y.ds = (y.eta + 5 * u + 2 * h) * size(x.ds)
    moved = (y.dp * x.z + y.delta) * x.slope + x.slope_error * size(x.part)
    y.ds += scale * (x.p * moved + f * (x.p > 0))
    y.dq = y.ds @ k + y.sums * (size(x.ds) @ k) + h * size(x.ds @ x.k) + f
    if h:
        y.dq += scale * _grid(x)
    terms = product(x.q.shape[-2] * group) + u
    y.dk = turned(y.ds + terms * size(x.ds)) @ size(x.q)
    y.dk += h * size(turned(x.ds) @ x.q) + f
    stored = h if np.ndim(x.z) == 0 else 2 * h + u
    p = x.p * x.z
    y.dv = turned(p * (y.eta + terms + stored) + f * (p > 0)) @ dout
    y.dv += h * size(turned(p) @ x.dout) + f


def _grid(x: SimpleNamespace) -> Any:
    """Errors of dq / scale where it is a sum of integers.

    A part from each key tile is rounded to half a step; the steps are in
    (z |dO_i| max|V_j| + |delta_i|) max|K_jc|.
    """
    longest = np.sqrt((x.v**2).sum(-1)).max(-1)[..., None, None]
    limit = np.sqrt((x.dout**2).sum(-1, keepdims=True)) * longest
    delta = np.abs((x.dout * x.out).sum(-1, keepdims=True))
    limit = np.max(x.z, initial=1.0) * limit + delta
    limit = limit * np.abs(x.k).max(axis=(-2, -1), keepdims=True)
    return -(-x.k.shape[-2] // DQ_KEYS) / 2 * limit / DQ_STEPS


def results(x: SimpleNamespace) -> tuple[Any, ...]:
    """out, lse, dq, dk and dv of exact matrices, or of bounds."""
    return x.out, x.lse, x.dq, x.dk, x.dv


def derivative_bounds(
    x: SimpleNamespace,
    arithmetic: Arithmetic,
    group: int = 1,
    relative: bool = True,
) -> tuple[Any, ...]:
    """The bounds of out_dot, lse_dot, d2q, d2k and d2v.

    Parameters
    ----------
    x : namespace
        As of `every_bound`, and q_dot, k_dot, v_dot, w, b, r, out_dot, u, t;
        lowest and highest w of the keys that a row sees.
    group : int
        Query heads whose d2k and d2v are added up afterwards.
    relative : bool
        Whether W is taken relative to a mean of the row's, or to 0.
    """
    y = every_bound(x, arithmetic, DERIVATIVES_WIDE)
    u, h, f = _units(arithmetic)
    size, product, keys = np.abs, arithmetic.product, x.k.shape[-2]
    of_two = y.sums + product(2 * keys) - product(keys) + h  # nu'
    q, k, v, dout = map(size, (x.q, x.k, x.v, x.dout))
    q_dot, k_dot, v_dot = map(size, (x.q_dot, x.k_dot, x.v_dot))
    seen = x.p > 0

    p = y.weight + y.row + y.sums + 10 * u * size(x.lse[..., None]) + 2 * u
    w = q_dot @ turned(k) + q @ turned(k_dot)
    w = product(2 * q.shape[-1]) * size(x.scale) * w + 2 * u * size(x.w)
    moved, mean = (
        _distance(z, x) if relative else size(z) for z in (x.w, x.b)
    )
    b = _rowsum(x.p * ((p + y.sums + 2 * u) * moved + w))
    out_dot = (x.p * ((p + of_two + 2 * u + h) * moved + w)) @ v
    out_dot += f * ((seen * (1 + moved)) @ v + seen @ v_dot + 1)
    out_dot += (x.p * (p + of_two)) @ v_dot
    out_dot += b * size(x.out) + mean * (y.out + u * size(x.out))
    out_dot += (u + h) * size(x.out_dot)
    b += u * size(x.b)

    columns = product(v.shape[-1])
    r = w + b + u * size(x.r)
    of_u = columns * (dout @ turned(v_dot))
    of_u += _rowsum(dout * (out_dot + columns * size(x.out_dot)))
    of_u += (y.eta + 2 * u) * size(x.u)
    t = size(x.ds) * ((y.eta + 3 * u + 2 * h) * size(x.r) + r)
    t += (3 * u + 2 * h) * size(x.t) + size(x.scale) * f * seen
    t += size(x.scale) * x.p * (size(x.r) * (y.dp + y.delta) + of_u)
    d2q = (t + of_two * size(x.t)) @ k + (y.ds + of_two * size(x.ds)) @ k_dot
    d2q += h * size(x.d2q) + f
    queries = product(2 * q.shape[-2] * group) + u
    d2k = turned(t + queries * size(x.t)) @ q
    d2k += turned(y.ds + queries * size(x.ds)) @ q_dot + h * size(x.d2k) + f
    queries = product(q.shape[-2] * group) + u + 2 * h
    d2v = x.p * ((y.eta + u + queries) * size(x.r) + r) + f * seen
    d2v = turned(d2v) @ dout + h * size(x.d2v) + f
    return out_dot, b[..., 0], d2q, d2k, d2v


def _distance(w: Any, x: SimpleNamespace) -> Any:
    """The largest difference of w and a mean of the row's W."""
    return np.maximum(abs(w - x.lowest), abs(x.highest - w))


def _rowsum(x: Any) -> Any:
    return x.sum(axis=-1, keepdims=True)


def _units(arithmetic: Arithmetic) -> tuple[float, float, float]:
    return arithmetic.unit, arithmetic.stored, arithmetic.floor


def turned(x: Any) -> Any:
    """The transposed matrices."""
    return np.swapaxes(x, -1, -2)
