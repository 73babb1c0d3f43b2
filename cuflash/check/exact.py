"""Every matrix of a call in float64, from calls on NumPy arrays.

P is what attention returns for values that are the identity: so bounds need no
second implementation of masks and scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash.api.attention import forward
from cuflash.check import options
from cuflash.check.bounds import turned

_MOST_COLUMNS = 512  # of values


def matrices(
    arrays: Mapping[str, np.ndarray], given: Mapping[str, Any]
) -> SimpleNamespace:
    """What `bounds.every_bound` reads, heads first.

    Parameters
    ----------
    arrays : mapping
        q, k, v and, for gradients, dout, in float64 and the public layout.
    given : mapping
        The options of the call in float64.
    """
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    heads = q.shape[2]
    x = SimpleNamespace(
        q=heads_first(q), k=heads_first(k, heads), v=heads_first(v, heads),
        dout=None, scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    plain = options.without_dropout(given)
    x.p, lse = weights(q, k, plain)
    if plain != given:
        dropped, _ = weights(q, k, given)
        x.z = np.divide(
            dropped, x.p, out=np.zeros_like(x.p), where=x.p > 0
        )  # fmt: skip
    z = getattr(x, "z", 1.0)
    seen = x.p > 0
    x.lse = np.where(np.isfinite(lse), lse, 0.0)
    with np.errstate(divide="ignore"):
        x.s = np.where(seen, np.log(x.p) + x.lse[..., None], 0.0)
    x.m = np.where(seen, x.s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    x.m = np.where(np.isfinite(x.m), x.m, 0.0)
    _add_options(x, given, seen)
    x.out = (x.p * z) @ x.v
    if "dout" in arrays:
        x.dout = heads_first(arrays["dout"])
        x.delta = (x.dout * x.out).sum(-1, keepdims=True)
        x.part = z * (x.dout @ turned(x.v)) - x.delta
        x.ds = x.scale * x.p * x.part * x.slope
    return x


def weights(
    q: np.ndarray, k: np.ndarray, given: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """P, with dropout's factors if that is given, and lse."""
    batch, keys, heads_kv, _ = k.shape
    parts, lse = [], np.empty(0)
    for start in range(0, keys, _MOST_COLUMNS):
        columns = np.eye(keys)[:, None, start : start + _MOST_COLUMNS]
        shape = batch, keys, heads_kv, columns.shape[-1]
        part, lse = forward(
            q, k, np.broadcast_to(columns, shape), return_lse=True, **given
        )
        parts.append(part)
    return heads_first(np.concatenate(parts, axis=-1)), lse


def _add_options(
    x: SimpleNamespace, given: Mapping[str, Any], seen: Any
) -> None:
    """The errors that options add (`bounds.PLAIN`), and the slope."""
    products = x.q @ turned(x.k) * x.scale
    x.sizes = np.abs(x.scale) * (np.abs(x.q) @ turned(np.abs(x.k)))
    x.steps = options.steps(given, x.s, x.sizes)
    x.slope, x.cap = options.slope(given, products)
    if "sink" in given:
        sink = np.asarray(given["sink"], np.float64)[:, None, None]
        x.sink = sink
        x.p_sink = np.exp(sink - x.lse[..., None])
        x.m = np.maximum(x.m, sink)
        x.sink_error = x.p_sink * (6 * (np.abs(sink) + np.abs(x.m)) + 4)


def with_tangents(x: SimpleNamespace, arrays: Mapping[str, Any]) -> None:
    """Add the matrices of jvp and of double_backward."""
    heads = x.q.shape[1]
    for name in "qkv":
        moved = arrays[f"{name}_dot"]
        dot = heads_first(moved, None if name == "q" else heads)
        setattr(x, f"{name}_dot", dot)
    x.w = x.scale * (x.q_dot @ turned(x.k) + x.q @ turned(x.k_dot))
    x.b = (x.p * x.w).sum(-1, keepdims=True)
    x.r = x.w - x.b
    seen = x.p > 0
    # Of rows that see no key, the bounds are 0 times this.
    x.lowest = np.where(seen, x.w, np.inf).min(-1, keepdims=True)
    x.highest = np.where(seen, x.w, -np.inf).max(-1, keepdims=True)
    blind = ~seen.any(-1, keepdims=True)
    x.lowest, x.highest = (
        np.where(blind, 0.0, y) for y in (x.lowest, x.highest)
    )
    x.out_dot = (x.p * x.w) @ x.v + x.p @ x.v_dot - x.b * x.out
    inner = (x.dout * x.out_dot).sum(-1, keepdims=True)
    x.u = x.dout @ turned(x.v_dot) - inner
    x.t = x.scale * x.p * (x.part * x.r + x.u)
    x.d2q = x.t @ x.k + x.ds @ x.k_dot
    x.d2k = turned(x.t) @ x.q + turned(x.ds) @ x.q_dot
    x.d2v = turned(x.p * x.r) @ x.dout


def heads_first(array: np.ndarray, heads: int | None = None) -> np.ndarray:
    """(batch, heads, tokens, columns), key heads repeated for their group."""
    array = array.swapaxes(1, 2)
    if heads is None:
        return array
    return np.repeat(array, heads // array.shape[1], axis=1)


def heads_last(array: np.ndarray, heads_kv: int | None = None) -> np.ndarray:
    """The public layout; query heads of a key head are added up."""
    if heads_kv is not None:
        batch, heads, *rest = array.shape
        array = array.reshape(batch, heads_kv, -1, *rest).sum(axis=2)
    return array.swapaxes(1, 2)
