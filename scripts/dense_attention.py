"""Plain attention with CuPy, to check results against: one head at a time.

Masks and score modifications are those of docs/guide/options.md. Used by
bench.py and fuzz.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cupy

ROWS = 2048  # of scores in a chunk


class Options(NamedTuple):
    """The options of one head, except scale and causal.

    Attributes
    ----------
    window : (left, right)
        None for no bound.
    softcap, sink : float or None
    slope : float
        ALiBi's slope, 0 for none.
    bias : array, (queries, keys), or None
    segment_ids : two arrays, (queries,) and (keys,), or None
    """

    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    slope: float = 0.0
    bias: cupy.ndarray | None = None
    sink: float | None = None
    segment_ids: tuple[cupy.ndarray, cupy.ndarray] | None = None


NO_OPTIONS = Options()


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
    options: Options = NO_OPTIONS,
) -> Attended:
    """Compute attention of one head, and its gradients if `dout`.

    Parameters
    ----------
    q, k, v, dout : array, (tokens, columns)
        In the dtype to compute in.
    stored : callable
        Rounds P, dP and dS, which plain code would store in a narrower
        dtype. Results are not rounded.
    options : Options
        Masks and score modifications.
    """
    if causal:
        options = options._replace(window=(options.window[0], 0))
    chunks = []
    dk = dv = None
    if dout is not None:
        dk, dv = cupy.zeros_like(k), cupy.zeros_like(v)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        s = q[rows] @ k.T * scale
        positions = cupy.arange(start, start + len(s)) + len(k) - len(q)
        s, derivative = _scores(s, rows, positions, options)
        m = s.max(axis=1, keepdims=True)
        if options.sink is not None:
            m = cupy.maximum(m, options.sink)
        m[m == -cupy.inf] = 0  # a row that sees no key
        p = cupy.exp(s - m)
        total = p.sum(axis=1, keepdims=True)
        if options.sink is not None:
            total += cupy.exp(options.sink - m)
        lse = (m + cupy.log(total))[:, 0]
        p = stored(p / cupy.where(total == 0, 1, total))
        dq = None
        if dout is not None:
            dp = stored(dout[rows] @ v.T)
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
            ds = stored(ds * derivative)
            dq = scale * (ds @ k)
            dk += scale * (ds.T @ q[rows])
            dv += p.T @ dout[rows]
        chunks.append((p @ v, lse, dq))
    out, lse, dq = (
        None if parts[0] is None else cupy.concatenate(parts)
        for parts in zip(*chunks, strict=True)
    )
    return Attended(out, lse, dq, dk, dv)


def _scores(
    s: cupy.ndarray, rows: slice, positions: cupy.ndarray, options: Options
) -> tuple[cupy.ndarray, cupy.ndarray | float]:
    """Return scores from scale * QK^T of some rows, and their derivative.

    `positions` are the keys with which the rows are aligned.
    """
    derivative = 1.0
    if options.softcap is not None:
        t = cupy.tanh(s / options.softcap)
        s, derivative = options.softcap * t, 1 - t * t
    behind = cupy.arange(s.shape[1]) - positions[:, None]
    if options.slope:
        s -= (options.slope * abs(behind)).astype(s.dtype)
    if options.bias is not None:
        s += options.bias[rows].astype(s.dtype)
    left, right = options.window
    if left is not None:
        s[behind < -left] = -cupy.inf
    if right is not None:
        s[behind > right] = -cupy.inf
    if options.segment_ids is not None:
        ids_q, ids_k = options.segment_ids
        s[ids_q[rows, None] != ids_k] = -cupy.inf
    return s, derivative
