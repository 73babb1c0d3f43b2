"""Plain attention with CuPy, to check results against: one head, row by row.

Used by bench.py and fuzz_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cupy

ROWS = 2048  # of a chunk of the matrix of scores


class Attended(NamedTuple):
    """Results of one head: (tokens, columns) arrays, and lse (tokens,)."""

    out: cupy.ndarray
    lse: cupy.ndarray
    dq: cupy.ndarray | None
    dk: cupy.ndarray | None
    dv: cupy.ndarray | None


def attend(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    dout: cupy.ndarray | None = None,
    *,
    scale: float,
    causal: bool,
    stored: Callable[[cupy.ndarray], cupy.ndarray] = lambda x: x,
) -> Attended:
    """Attention of one head, and with `dout` its gradients.

    Parameters
    ----------
    q, k, v, dout : array, (tokens, columns)
        In the dtype to compute in.
    stored : callable
        Rounds P, dP and dS, which plain code would keep in a narrower dtype.
        Results are not rounded.
    """
    chunks = []
    dk = dv = None
    if dout is not None:
        dk, dv = cupy.zeros_like(k), cupy.zeros_like(v)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        s = q[rows] @ k.T * scale
        if causal:
            last_seen = cupy.arange(start, start + len(s)) + len(k) - len(q)
            s[cupy.arange(len(k)) > last_seen[:, None]] = -cupy.inf
        m = s.max(axis=1, keepdims=True)
        m[m == -cupy.inf] = 0  # a row that sees no key
        p = cupy.exp(s - m)
        total = p.sum(axis=1, keepdims=True)
        lse = (m + cupy.log(total))[:, 0]
        p = stored(p / cupy.where(total == 0, 1, total))
        dq = None
        if dout is not None:
            dp = stored(dout[rows] @ v.T)
            ds = stored(p * (dp - (p * dp).sum(axis=1, keepdims=True)))
            dq = scale * (ds @ k)
            dk += scale * (ds.T @ q[rows])
            dv += p.T @ dout[rows]
        chunks.append((p @ v, lse, dq))
    out, lse, dq = (
        None if parts[0] is None else cupy.concatenate(parts)
        for parts in zip(*chunks, strict=True)
    )
    return Attended(out, lse, dq, dk, dv)
