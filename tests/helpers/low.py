"""`low`: what plain attention in the dtype itself would give.

Every matrix stands whole. Products add up in float32 (float64 for
float64), the softmax is float32 from the scores on, and whatever plain code
would store in the dtype is rounded to it: P, dP, dS and the results. Its
distance to the float64 reference is the error that the dtype costs anyone,
and ours may be a small multiple of that (CONTRIBUTING, "Error").
"""

import numpy as np

from .dtypes import lse_dtype
from .heads import heads_first, heads_last, sum_groups, visible


def softmax(s):
    """Softmax of rows; a row of -inf gives zeros."""
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, 0, m))
    total = p.sum(axis=-1, keepdims=True)
    return p / np.where(total == 0, 1, total)


def probabilities(q, k, scale, causal):
    wide = q.dtype
    s = (q @ k.swapaxes(-1, -2)) * wide.type(scale)
    see = visible(q.shape[-2], k.shape[-2], causal)
    return softmax(np.where(see, s, wide.type(-np.inf)))


def forward(q, k, v, *, scale, causal):
    """Return out in the dtype of q; all in the public layout."""
    dtype, wide, heads = q.dtype, lse_dtype(q.dtype), q.shape[2]
    q, k, v = (heads_first(x, heads).astype(wide) for x in (q, k, v))
    p = probabilities(q, k, scale, causal).astype(dtype).astype(wide)
    return heads_last(p @ v).astype(dtype)


def backward(dout, q, k, v, *, scale, causal):
    """Return dq, dk, dv in the dtype of q; all in the public layout."""
    dtype, wide = q.dtype, lse_dtype(q.dtype)
    heads, heads_kv = q.shape[2], k.shape[2]
    dout, q, k, v = (
        heads_first(x, heads).astype(wide) for x in (dout, q, k, v)
    )

    def stored(x):
        return x.astype(dtype).astype(wide)

    p = stored(probabilities(q, k, scale, causal))
    dp = stored(dout @ v.swapaxes(-1, -2))
    delta = (p * dp).sum(axis=-1, keepdims=True)
    ds = stored(p * (dp - delta))
    scale = wide.type(scale)
    dq = scale * (ds @ k)
    dk = scale * sum_groups(ds.swapaxes(-1, -2) @ q, heads_kv)
    dv = sum_groups(p.swapaxes(-1, -2) @ dout, heads_kv)
    return tuple(heads_last(x).astype(dtype) for x in (dq, dk, dv))
