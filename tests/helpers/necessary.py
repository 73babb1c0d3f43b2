"""Attention in float64 with the roundings that 16-bit kernels make.

Tensor cores multiply numbers of the dtype. So P is rounded once, relative to
its row's maximum in the forward pass, as exp(S - lse) in the backward pass;
dS is made of the rounded P and rounded. Results are stored in the dtype, and
delta is made of the stored out. Nothing else is rounded. Arrays are (...,
rows, columns), of plain calls.
"""

import numpy as np


def results(q, k, v, dout, *, dtype, scale):
    """Return out, dq, dk and dv in float64, and what they would be exactly.

    Returns
    -------
    list of (ndarray, ndarray)
    """

    def of(rounded):
        s = scale * (q @ k.mT)
        m = s.max(axis=-1, keepdims=True)
        weights = np.exp(s - m)
        total = weights.sum(axis=-1, keepdims=True)
        out = rounded(rounded(weights) @ v / total)
        p = rounded(weights / total)
        delta = (dout * out).sum(axis=-1, keepdims=True)
        ds = rounded(p * (dout @ v.mT - delta))
        dq, dk, dv = scale * (ds @ k), scale * (ds.mT @ q), p.mT @ dout
        return out, *map(rounded, (dq, dk, dv))

    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    stored = of(lambda x: x.astype(dtype).astype(np.float64))
    return list(zip(stored, of(lambda x: x), strict=True))
