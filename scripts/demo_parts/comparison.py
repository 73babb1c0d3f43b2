"""Compares cuflash with attention that materialises the scores."""

from __future__ import annotations

import math
import time
import tracemalloc

import ml_dtypes
import numpy as np

import cuflash
from device_memory import peak_bytes


def materialised(dout, q, k, v, compute, xp):
    """Compute attention and gradients with P, seqlen_q by seqlen_k.

    Arithmetic is in `compute`; P and dS are rounded to q's dtype between
    matmuls, as tensor cores require.
    """

    def heads_first(x):
        return x.swapaxes(1, 2).astype(compute, copy=False)

    def rounded(x):
        return x.astype(dtype, copy=False).astype(compute, copy=False)

    def result(x):
        return x.swapaxes(1, 2).astype(dtype, copy=False)

    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    dout, q, k, v = (heads_first(x) for x in (dout, q, k, v))
    p = scale * (q @ k.swapaxes(-1, -2))
    seqlen_q, seqlen_k = p.shape[-2:]
    hidden = xp.arange(seqlen_k) > (
        xp.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    )
    p += xp.where(hidden, -math.inf, 0.0).astype(compute)
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    p = rounded(p)
    out = p @ v
    dv = p.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    ds = rounded(ds)
    dq, dk = scale * (ds @ k), scale * (ds.swapaxes(-1, -2) @ q)
    return tuple(result(x) for x in (out, dq, dk, dv))


class Materialised:
    """The cuflash calls that the model makes, with materialised P."""

    def __init__(self, compute, xp):
        self.compute, self.xp = compute, xp

    def forward(self, q, k, v, *, causal, return_lse):
        assert causal and return_lse
        out, *_ = materialised(q, q, k, v, self.compute, self.xp)
        return out, None

    def backward(self, dout, q, k, v, out, lse, *, causal):
        assert causal
        return materialised(dout, q, k, v, self.compute, self.xp)[1:]


def tiled(dout, q, k, v):
    """Return the same four arrays from cuflash."""
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    return out, *cuflash.backward(dout, q, k, v, out, lse, causal=True)


def compare(dout, q, k, v, xp):
    """Errors of cuflash and of materialised attention, both against float64.

    Yields name, largest exact value, error of materialised, error of
    cuflash, and the bound: `factor` times the error of materialised attention
    in the same dtype, plus one rounding (eps times the largest value), in
    case that error happens to be small.
    """
    wide = [x.astype(np.float64) for x in (dout, q, k, v)]
    exact = materialised(*wide, np.float64, xp)
    low = materialised(dout, q, k, v, np.float32, xp)
    got = tiled(dout, q, k, v)
    eps = float(ml_dtypes.finfo(q.dtype).eps)
    for i, (name, factor) in enumerate(
        {"out": 2, "dq": 3, "dk": 3, "dv": 3}.items()
    ):
        largest = float(abs(exact[i]).max())
        error_low, error = (
            float(abs(x[i].astype(np.float64) - exact[i]).max())
            for x in (low, got)
        )
        bound = factor * error_low + eps * largest
        yield name, largest, error_low, error, bound


# ---- Time and memory of both ----


def seconds_of(call, xp, repeats=5, at_most=2.0):
    """Return the time of the fastest of a few runs."""

    def wait():
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()

    times = []
    call()
    wait()
    while len(times) < repeats and sum(times) < at_most:
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def bytes_of(call, xp):
    """Return the call's memory beyond its inputs, results included."""
    if xp is np:
        tracemalloc.start()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak
    return peak_bytes(call)


def costs(inputs, xp):
    """Return (seconds, bytes) of cuflash and of materialised attention."""

    def ours():
        tiled(*inputs)

    def theirs():
        materialised(*inputs, np.float32, xp)

    return [
        (seconds_of(call, xp), bytes_of(call, xp)) for call in (ours, theirs)
    ]


def random_inputs(seqlen, config, xp, seed):
    """Return dout, q, k, v of one text: (1, seqlen, num_heads, head_dim)."""
    rng = np.random.default_rng(seed)
    shape = (4, 1, seqlen, config.num_heads, config.head_dim)
    x = xp.asarray(rng.standard_normal(shape, dtype=np.float32))
    return x.astype(config.attention_dtype, copy=False)
