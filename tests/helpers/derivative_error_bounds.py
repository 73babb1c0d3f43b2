"""Exact derivatives, and the worst-case errors of docs/guide/accuracy.md.

What `bounds` is to attention and its gradient, this is to jvp and to
double_backward: for every input, to first order, element by element. The
direction is (q_dot, k_dot, v_dot), for double_backward the cotangents of dq,
dk and dv. Arrays are as in `bounds`.
"""

import numpy as np

from .bounds import every_bound, exact, turned
from .heads import visible

WIDE = 64  # above these head dimensions simt's tiles may have 4 keys


def exact_derivatives(dout, q, k, v, direction, *, scale, causal):
    """Return every matrix of attention and of its derivatives."""
    x = exact(dout, q, k, v, scale=scale, causal=causal)
    x.q_dot, x.k_dot, x.v_dot = direction
    x.w = scale * (x.q_dot @ turned(k) + q @ turned(x.k_dot))
    x.b = (x.p * x.w).sum(axis=-1, keepdims=True)
    x.r = x.w - x.b
    see = visible(q.shape[-2], k.shape[-2], causal)
    x.lowest = np.where(see, x.w, np.inf).min(axis=-1, keepdims=True)
    x.highest = np.where(see, x.w, -np.inf).max(axis=-1, keepdims=True)
    x.out_dot = (x.p * x.w) @ v + x.p @ x.v_dot - x.b * x.out
    x.lse_dot = x.b[..., 0]

    x.u = dout @ turned(x.v_dot) - _rowsum(dout * x.out_dot)
    x.t = scale * x.p * (x.part * x.r + x.u)
    x.d2q = x.t @ k + x.ds @ x.k_dot
    x.d2k = turned(x.t) @ q + turned(x.ds) @ x.q_dot
    x.d2v = turned(x.p * x.r) @ dout
    return x


def derivative_bounds(x, arithmetic, group=1, relative=True):
    """Return the bounds of out_dot, lse_dot, d2q, d2k and d2v.

    group : query heads whose d2k and d2v are added up afterwards.
    relative : whether W is taken relative to a mean of the row's, or to 0.
    """
    y, u, size = every_bound(x, arithmetic, WIDE), arithmetic.unit, np.abs
    product, keys = arithmetic.product, x.k.shape[-2]
    of_two = y.sums + product(2 * keys) - product(keys)  # nu'
    q, k, v, dout = map(size, (x.q, x.k, x.v, x.dout))
    q_dot, k_dot, v_dot = map(size, (x.q_dot, x.k_dot, x.v_dot))

    p = y.weight + y.row + y.sums + 10 * u * size(x.lse[..., None]) + 2 * u
    w = q_dot @ turned(k) + q @ turned(k_dot)
    w = product(2 * q.shape[-1]) * size(x.scale) * w + 2 * u * size(x.w)
    moved, mean = (
        _distance(z, x) if relative else size(z) for z in (x.w, x.b)
    )
    b = _rowsum(x.p * ((p + y.sums + 2 * u) * moved + w))
    out_dot = (x.p * ((p + of_two + 2 * u) * moved + w)) @ v
    out_dot += (x.p * (p + of_two)) @ v_dot
    out_dot += b * size(x.out) + mean * (y.out + u * size(x.out))
    out_dot += u * size(x.out_dot)
    b += u * size(x.b)

    columns = product(v.shape[-1])
    r = w + b + u * size(x.r)
    of_u = columns * (dout @ turned(v_dot))
    of_u += _rowsum(dout * (out_dot + columns * size(x.out_dot)))
    of_u += (y.eta + 2 * u) * size(x.u)
    t = size(x.ds) * ((y.eta + 3 * u) * size(x.r) + r) + 3 * u * size(x.t)
    t += size(x.scale) * x.p * (size(x.r) * (y.dp + y.delta) + of_u)
    d2q = (t + of_two * size(x.t)) @ k + (y.ds + of_two * size(x.ds)) @ k_dot
    queries = product(2 * q.shape[-2] * group) + u
    d2k = turned(t + queries * size(x.t)) @ q
    d2k += turned(y.ds + queries * size(x.ds)) @ q_dot
    queries = product(q.shape[-2] * group) + u
    d2v = x.p * ((y.eta + u + queries) * size(x.r) + r)
    return out_dot, b[..., 0], d2q, d2k, turned(d2v) @ dout


def results(x):
    """Return out_dot, lse_dot, d2q, d2k and d2v of exact matrices."""
    return x.out_dot, x.lse_dot, x.d2q, x.d2k, x.d2v


def _distance(w, x):
    """Return the largest difference of w and a mean of the row's W."""
    return np.maximum(abs(w - x.lowest), abs(x.highest - w))


def _rowsum(x):
    return x.sum(axis=-1, keepdims=True)
