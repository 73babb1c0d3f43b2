"""forward, backward and double_backward on whole score matrices.

For float64 arrays (batch, seqlen, heads, head_dim), without options.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def forward(q: Any, k: Any, v: Any, *, scale: float, return_lse: bool) -> Any:
    """out, and lse if wanted."""
    q, k, v = map(_by_head, (q, k, v))
    scores = scale * q @ _turned(k)
    largest = scores.max(-1, keepdims=True)
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    scores /= total
    out = _by_head(scores @ v)
    return (out, (largest + np.log(total))[..., 0]) if return_lse else out


def backward(
    dout: Any, q: Any, k: Any, v: Any, *, out: Any, lse: Any, dlse: Any,
    scale: float,
) -> Any:  # fmt: skip
    """dq, dk and dv."""
    dout, q, k, v, out = map(_by_head, (dout, q, k, v, out))
    p = _weights(q, k, lse, scale)
    dv = _turned(p) @ dout
    ds = dout @ _turned(v)
    ds -= (dout * out).sum(-1, keepdims=True) - dlse[..., None]
    ds *= p
    ds *= scale
    return tuple(map(_by_head, (ds @ k, _turned(ds) @ q, dv)))


def double_backward(
    ddq: Any, ddk: Any, ddv: Any, dout: Any, q: Any, k: Any, v: Any, *,
    out: Any, lse: Any, dlse: Any, scale: float, return_ddlse: bool,
) -> Any:  # fmt: skip
    """d2q, d2k, d2v and ddout; ddlse if wanted."""
    ddq, ddk, ddv, dout = map(_by_head, (ddq, ddk, ddv, dout))
    q, k, v, out = map(_by_head, (q, k, v, out))
    p = _weights(q, k, lse, scale)
    w = ddq @ _turned(k)
    w += q @ _turned(ddk)
    w *= scale
    pw = p * w
    b = pw.sum(-1, keepdims=True)
    ddout = pw @ v + p @ ddv - b * out
    pw -= p * b
    d2v = _turned(pw) @ dout
    mean = (dout * out).sum(-1, keepdims=True) - dlse[..., None]
    dp = dout @ _turned(v)
    dp -= mean
    ds = p * dp
    # T = P ((dP - D) W + dO ddV^T - b dP - E), E = dO . ddO - b D
    dp *= w - b
    dp += dout @ _turned(ddv)
    dp -= (dout * ddout).sum(-1, keepdims=True)
    dp *= p
    d2q = scale * (ds @ ddk + dp @ k)
    d2k = scale * (_turned(ds) @ ddq + _turned(dp) @ q)
    results = tuple(map(_by_head, (d2q, d2k, d2v, ddout)))
    return (*results, b[..., 0]) if return_ddlse else results


def _weights(q: Any, k: Any, lse: Any, scale: float) -> np.ndarray:
    scores = scale * q @ _turned(k)
    scores -= lse[..., None]
    return np.exp(scores, out=scores)


def _by_head(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(1, 2)


def _turned(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)
