"""The calls on NumPy arrays, by the reference's tiled functions.

Everything is computed in float64, and rounded to the arrays' dtype last.
Heads become leading axes, (batch, num_heads_kv, group_size, seqlen, d), along
which the query heads of a group share the keys without a copy.
"""

from __future__ import annotations

import numpy as np

from .problem import Call, Problem
from .reference import backward as backward_of
from .reference import forward as forward_of
from .reference.tile_state import TileState

DEFAULT_BLOCK = 128  # a tile's scores in float64 are 128 KiB

# Overflow and NaN are results here, whatever the caller has NumPy do.
_quiet = np.errstate(all="ignore")


@_quiet
def forward(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return out (batch, seqlen_q, num_heads_q, head_dim_v), and lse."""
    problem = call.problem
    q = _queries(call.arrays["q"], problem)
    k = _keys(call.arrays["k"], problem)
    v = _keys(call.arrays["v"], problem)
    out, lse = forward_of.query_outer(q, k, v, **_options(problem))
    result = _round(_tokens_first(out, problem), call)
    if call.out is not None:
        call.out[...] = result
        result = call.out
    shape = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    return result, lse.reshape(shape).astype(problem.lse_dtype)


@_quiet
def backward(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return dq, dk and dv, like q, k and v."""
    problem = call.problem
    q, out, dout = (
        _queries(call.arrays[name], problem) for name in ("q", "out", "dout")
    )
    k, v = (_keys(call.arrays[name], problem) for name in ("k", "v"))
    lse = call.arrays["lse"].reshape(q.shape[:-1]).astype(np.float64)
    if problem.lse_dtype == "float32":
        lse = _unrounded(lse, q, k, problem)
    dq, dk, dv = backward_of.key_outer(
        dout, q, k, v, out, lse, **_options(problem)
    )
    return (
        _round(_tokens_first(dq, problem), call),
        _round(dk.sum(axis=2).swapaxes(1, 2), call),
        _round(dv.sum(axis=2).swapaxes(1, 2), call),
    )


@_quiet
def merge_states(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse over the keys of both states."""
    arrays = call.arrays
    a, b = (
        TileState.of_result(arrays[out], arrays[lse].swapaxes(1, 2))
        for out, lse in (("out_a", "lse_a"), ("out_b", "lse_b"))
    )
    out, lse = a.merge(b).finalize()
    lse = np.ascontiguousarray(lse.swapaxes(1, 2))
    return _round(out, call), lse.astype(call.problem.lse_dtype)


def _options(problem: Problem) -> dict:
    return {
        "scale": problem.scale,
        "causal": problem.causal,
        "block_q": problem.block_q or DEFAULT_BLOCK,
        "block_k": problem.block_k or DEFAULT_BLOCK,
    }


def _queries(array: np.ndarray, problem: Problem) -> np.ndarray:
    """(batch, seqlen_q, num_heads_q, d) by key head and place in its group."""
    batch, seqlen_q, _, d = array.shape
    groups = (problem.num_heads_kv, problem.group_size)
    split = array.reshape(batch, seqlen_q, *groups, d)
    return split.transpose(0, 2, 3, 1, 4).astype(np.float64)


def _keys(array: np.ndarray, problem: Problem) -> np.ndarray:
    """(batch, seqlen_k, num_heads_kv, d), seen by every place in a group."""
    # Widened first: to widen what is broadcast would make the copies.
    by_head = array.swapaxes(1, 2).astype(np.float64)[:, :, None]
    batch, num_heads_kv, _, seqlen_k, d = by_head.shape
    shape = (batch, num_heads_kv, problem.group_size, seqlen_k, d)
    return np.broadcast_to(by_head, shape)


def _tokens_first(array: np.ndarray, problem: Problem) -> np.ndarray:
    """The inverse of `_queries`."""
    seqlen_q, d = array.shape[-2:]
    shape = (problem.batch, seqlen_q, problem.num_heads_q, d)
    return array.transpose(0, 3, 1, 2, 4).reshape(shape)


def _round(array: np.ndarray, call: Call) -> np.ndarray:
    """To the dtype of the inputs, in C order and native bytes."""
    dtype = next(iter(call.arrays.values())).dtype.newbyteorder("=")
    return array.astype(dtype, order="C")


def _unrounded(
    lse: np.ndarray, q: np.ndarray, k: np.ndarray, problem: Problem
) -> np.ndarray:
    """Undo the rounding of lse to float32 where these keys tell how.

    P = exp(S - lse) takes the absolute error of lse as a relative one. At
    scores of 1e4 that is 1e-3 already, and at 1e30 nothing is left of P. So
    lse is computed again and used where it agrees to float32. It does not
    where the caller's lse covers more keys than these; then his is used.
    """
    no_values = k[..., :0]
    _, exact = forward_of.query_outer(q, k, no_values, **_options(problem))
    step = np.spacing(np.abs(lse).astype(np.float32))
    return np.where(np.abs(exact - lse) <= step, exact, lse)
