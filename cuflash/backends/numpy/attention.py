"""Runs calls on NumPy arrays, in float64 or float32.

Attention is computed by `numpy_tiles`, in float64 for float64 arrays and in
float32 for all others, and rounded once at the end; rows that are UNBOUNDED
(NaN, infinities, scores of thousands: see `numpy_kinds`) by the reference in
float64, which also merges states, rotates, and reads caches. Scores have the
range of the kernels' scores: float32, or float64 for float64 arrays.
"""

from __future__ import annotations

from functools import reduce

import ml_dtypes
import numpy as np

from cuflash.backends.numpy import (
    nan as numpy_nan,
)
from cuflash.backends.numpy import (
    reference as numpy_reference,
)
from cuflash.backends.numpy import (
    tiles as numpy_tiles,
)
from cuflash.backends.numpy.derivatives import double_backward, jvp
from cuflash.backends.numpy.kinds import Kind
from cuflash.backends.numpy.parts import (
    by_key_heads,
    by_query_heads,
    dtype_of,
    like,
    operands,
    part_options,
    parts,
    zero_gradients,
)
from cuflash.backends.numpy.reference import LARGEST_FLOAT32
from cuflash.backends.numpy.scores import of_heads
from cuflash.plans import plan
from cuflash.reference import kvcache
from cuflash.reference.packed import spans
from cuflash.reference.rotary import apply_rotary as apply_rotary_to
from cuflash.reference.tile_state import TileState
from cuflash.request.problem import Call

__all__ = [
    "apply_rotary",
    "backward",
    "double_backward",
    "finish",
    "forward",
    "forward_kvcache",
    "jvp",
    "merge_states",
]

# Overflow and NaN are valid results, whatever the caller's np.errstate.
_quiet = np.errstate(all="ignore")


@_quiet
def forward(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return out (batch, seqlen_q, num_heads_q, head_dim_v), and lse."""
    p = call.problem
    plan.check(p)
    q, k, v = operands(call, "q", "k", "v")
    shape = (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v)
    result = np.zeros(shape, dtype_of(call))
    out = by_query_heads(result, p)
    lse = np.full(q.shape[:-1], -np.inf, q.dtype)
    for part in parts(call, q, k, v):
        at, keys = part.of_queries, part.of_keys
        numpy_tiles.forward(
            part.bounded_rows(q),
            part.bounded_keys(k),
            part.bounded_keys(v),
            *(out[at], lse[at]),
            small=part.kind == Kind.SMALL,
            **part_options(call, part),
        )
        if part.flagged is not None:
            numpy_nan.forward(part.flagged, v[keys], [out[at]], [lse[at]])
        for rows in part.rows():
            numpy_reference.forward(
                *(rows, q[at], k[keys], v[keys], out[at], lse[at]), p.scale
            )
    lse = lse.reshape(p.batch, p.num_heads_q, p.seqlen_q)
    return _into(call.out, result), lse


@_quiet
def backward(call: Call) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv, like q, k and v; dbias, dsink if requested."""
    p = call.problem
    plan.check(p)
    q, k, v, out, dout = operands(call, "q", "k", "v", "out", "dout")
    given = {
        name: call.arrays[name].reshape(q.shape[:-1]).astype(q.dtype)
        for name in ("lse", "dlse")
        if name in call.arrays
    }
    results = [
        np.zeros(call.arrays[name].shape, dtype_of(call)) for name in "qkv"
    ]
    dq = by_query_heads(results[0], p)
    dk, dv = map(by_key_heads, results[1:])
    lse, dlse = given["lse"], given.get("dlse")
    values = [out, dout] if dlse is None else [out, dout, dlse]
    others = zero_gradients(call)
    for part in parts(call, q, k, v, values, lse):
        at, keys = part.of_queries, part.of_keys
        gradients = numpy_tiles.backward(
            part.bounded_rows(dout),
            part.bounded_rows(q),
            part.bounded_keys(k),
            part.bounded_keys(v),
            part.bounded_rows(out),
            part.bounded_rows(lse, np.inf),
            dlse=None if dlse is None else part.bounded_rows(dlse),
            **part_options(call, part),
        )
        if part.flagged is not None:
            numpy_nan.backward(part.flagged, dout[at], gradients)
        for rows in part.rows():
            numpy_reference.backward(
                *(rows, dout[at], q[at], k[keys], v[keys], out[at], lse[at]),
                None if dlse is None else dlse[at],
                p.scale,
                gradients,
            )
        dq[at], dk[keys], dv[keys], *rest = gradients
        for total, own in zip(others.values(), rest, strict=True):
            of_part = of_heads(total, part.heads)
            of_part += own
    wanted = {"bias": p.return_dbias, "sink": p.return_dsink}
    gradients = tuple(
        _into(call.gradients.get(f"d{name}"), x)
        for name, x in zip("qkv", results, strict=True)
    )
    return gradients + tuple(
        like(call.options[name], others[name])
        for name in wanted
        if wanted[name]
    )


@_quiet
def merge_states(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse over the keys of all states."""
    arrays = iter(call.arrays.values())
    merged = reduce(
        TileState.merge,
        (
            TileState.of_result(out, lse.swapaxes(1, 2))
            for out, lse in zip(arrays, arrays, strict=True)
        ),
    )
    out, lse = merged.finalize()
    out = np.where((lse == -np.inf)[..., None], 0.0, out)
    lse = np.ascontiguousarray(lse.swapaxes(1, 2))
    return _round(out, call), lse.astype(call.problem.lse_dtype)


@_quiet
def apply_rotary(call: Call) -> np.ndarray:
    """Return x, rotated."""
    rotary, tables = call.problem.rotary, call.options
    assert rotary is not None
    x = call.arrays["x"]
    positions = tables.get("positions", np.arange(x.shape[1]))
    rotated = apply_rotary_to(
        x, tables["cos"], tables["sin"], positions, rotary.interleaved,
        rotary.inverse,
    )  # fmt: skip
    return _into(call.out, _round(rotated, call))


@_quiet
def forward_kvcache(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Append to the caches; return out and lse."""
    p, given, options = call.problem, dict(call.given), dict(call.options)
    options.setdefault("cache_seqlens", call.cache_seqlens)
    if p.lse_dtype == "float32":
        options["largest_score"] = LARGEST_FLOAT32
    if p.softcap:
        options["softcap"] = p.softcap
    if p.kvcache and p.kvcache.rotary:
        given |= _rotated(call, options)
    out, lse = kvcache.forward_kvcache(
        given["q"],
        *(_cache(given[name]) for name in ("k_cache", "v_cache")),
        k_new=given.get("k_new"),
        v_new=given.get("v_new"),
        scale=p.scale,
        causal=p.causal,
        window=p.window,
        **options,
    )
    if call.rank == 3:
        out, lse = out[None], lse[None]
    return _into(call.out, _round(out, call)), lse.astype(p.lse_dtype)


def finish() -> None:
    """Nothing is left to wait for."""


def _rotated(call: Call, options: dict) -> dict[str, np.ndarray]:
    """q, rotated and rounded to its dtype as kernels do, and k_new, rotated.

    The reference does not round q. Takes the tables out of `options`.
    """
    p, given = call.problem, call.given
    assert p.kvcache is not None and p.kvcache.rotary is not None
    tables = options.pop("rotary_cos"), options.pop("rotary_sin")
    lengths = np.broadcast_to(options["cache_seqlens"], p.batch)
    ordered = p.causal or p.window != (None, None)
    rotated = {}
    for name in ("q", "k_new"):
        x = given[name]
        # Of each sequence, how far its tokens are from the first.
        if x.ndim == 4:
            steps, first = np.arange(x.shape[1]), lengths[:, None]
        else:
            steps, first = _steps(options["cu_seqlens_q"], lengths, len(x))
        if name == "q" and not ordered:
            steps = np.zeros_like(steps)
        rotated[name] = apply_rotary_to(
            x, *tables, first + steps, p.kvcache.rotary.interleaved
        )
    rotated["q"] = _round(rotated["q"], call)
    return rotated


def _steps(
    cu_seqlens: np.ndarray, lengths: np.ndarray, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each packed token's index in its sequence, and its sequence's length.

    Both are 0 for tokens of no sequence.
    """
    steps, first = np.zeros((2, total), np.int64)
    for number, rows, _ in spans(cu_seqlens, cu_seqlens, total, total):
        steps[rows] = np.arange(rows.stop - rows.start)
        first[rows] = lengths[number]
    return steps, first


def _cache(array: np.ndarray) -> np.ndarray:
    """A cache, as float8 if the user passed its bytes."""
    if array.dtype != np.uint8:
        return array
    return array.view(ml_dtypes.float8_e4m3fn)


def _round(array: np.ndarray, call: Call) -> np.ndarray:
    """Convert to the dtype of the inputs, C-contiguous, native bytes."""
    return array.astype(dtype_of(call), order="C")


def _into(given: np.ndarray | None, result: np.ndarray) -> np.ndarray:
    """The user's array with the result, if there is one, else the result."""
    if given is None:
        return result
    given[...] = result
    return given
