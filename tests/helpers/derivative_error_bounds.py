"""Exact derivatives, for `cuflash.check.bounds.derivative_bounds`.

What `bounds` is to attention and its gradient, this is to jvp and to
double_backward. The direction is (q_dot, k_dot, v_dot), for double_backward
the cotangents of dq, dk and dv. Arrays are as in `bounds`.
"""

import numpy as np

from cuflash.check.bounds import turned

from .bounds import exact
from .heads import visible


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


def results(x):
    """Return out_dot, lse_dot, d2q, d2k and d2v of exact matrices."""
    return x.out_dot, x.lse_dot, x.d2q, x.d2k, x.d2v


def _rowsum(x):
    return x.sum(axis=-1, keepdims=True)
