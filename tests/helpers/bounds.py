"""Exact results of attention and of its gradient, beside their bounds.

Unlike `rounding`, which allows what rounding at random comes to, the bounds of
`cuflash.check.bounds` hold for every input. Rows of keys see a query each, so
there is no -inf in lse. Arrays are (batch, heads, rows, columns), with as many
key heads as query heads, in a dtype finer than the call's: `exact` is as good
as that dtype is.
"""

from types import SimpleNamespace

import numpy as np

from cuflash.check.bounds import every_bound, results, turned

from .heads import visible


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
