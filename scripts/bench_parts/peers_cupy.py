"""Plain CuPy: matmul, softmax, matmul.

What a user of CuPy would write without cuflash: it materialises the scores and
several matrices of the same size.
"""

from __future__ import annotations

from collections.abc import Callable

import cupy

from .cells import Cell
from .peers import refuse_large_scores
from .runners import Inputs, Runner


def find(name: str) -> Runner:
    """The runner."""
    return Runner(
        "cupy", f"plain CuPy {cupy.__version__}, three steps", _prepare
    )


def _prepare(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
    refuse_large_scores(cell)
    # Softmax and sums are at least float32.
    wide = cupy.promote_types(inputs.q.dtype, cupy.float32)
    q, dout = (_heads_first(x) for x in (inputs.q, inputs.dout))
    k, v = (_heads_first(x) for x in (inputs.k, inputs.v))
    if cell.group_size > 1:
        k, v = (cupy.repeat(x, cell.group_size, axis=1) for x in (k, v))
    scale = q.dtype.type(cell.head_dim**-0.5)
    hidden = None
    if cell.causal:
        hidden = ~cupy.tri(cell.seqlen, dtype=bool)

    def weights():
        s = (cupy.matmul(q, k.swapaxes(2, 3)) * scale).astype(wide, copy=False)
        if hidden is not None:
            s[..., hidden] = -cupy.inf
        p = cupy.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return p.astype(q.dtype, copy=False)

    def forward():
        return (cupy.matmul(weights(), v).swapaxes(1, 2),)

    if cell.direction == "forward":
        return forward
    p = weights()

    def of_key_heads(x):
        if cell.group_size == 1:
            return x
        batch, heads, seqlen, d = x.shape
        x = x.reshape(batch, -1, cell.group_size, seqlen, d)
        return x.sum(axis=2, dtype=wide).astype(q.dtype, copy=False)

    def backward():
        dp = cupy.matmul(dout, v.swapaxes(2, 3)).astype(wide, copy=False)
        rows = (p * dp).sum(axis=-1, keepdims=True)
        ds = (p * (dp - rows)).astype(q.dtype, copy=False)
        dq = cupy.matmul(ds, k) * scale
        dk = of_key_heads(cupy.matmul(ds.swapaxes(2, 3), q) * scale)
        dv = of_key_heads(cupy.matmul(p.swapaxes(2, 3), dout))
        return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))

    return backward


def _heads_first(x: cupy.ndarray) -> cupy.ndarray:
    return cupy.ascontiguousarray(x.swapaxes(1, 2))
