"""Runs calls on NumPy arrays, in float64 or float32.

Attention and its derivatives are computed by `tiles`, in float64 for float64
arrays and in float32 for all others, and rounded once at the end; rows that
are UNBOUNDED (NaN, infinities, scores of thousands: see `kinds`) by the
reference in float64, which also merges states, rotates, and reads caches.
Scores have the range of the kernels' scores: float32, or float64 for float64
arrays.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from cuflash.backends.numpy import nan, reference, tiles
from cuflash.backends.numpy.arrays import (
    LOGITS,
    Arrays,
    directions,
    dtype_of,
    heads_first,
    operands,
    options,
    scalars,
    zeros_of_logits,
)
from cuflash.backends.numpy.caches import as_float8, rotated
from cuflash.backends.numpy.expressions import Recorded, gradients
from cuflash.backends.numpy.kinds import LARGEST_COTANGENT, LARGEST_VALUE, Kind
from cuflash.backends.numpy.parts import parts
from cuflash.backends.numpy.readouts import readout, readout_backward
from cuflash.backends.numpy.reference import LARGEST_FLOAT32
from cuflash.reference import kvcache
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
    "readout",
    "readout_backward",
]

# Overflow and NaN are valid results, whatever the caller's np.errstate.
_quiet = np.errstate(all="ignore")


def forward(call: Call) -> tuple[np.ndarray, ...]:
    """Return out (batch, seqlen_q, num_heads_q, head_dim_v), and lse.

    And max_score, if it is requested.
    """
    out, lse, max_score = _attend(call)
    results = _into(call.out, out[0]), lse[0]
    return (*results, max_score) if call.problem.return_max_score else results


def jvp(call: Call) -> tuple[np.ndarray, ...]:
    """Return out, lse, out_dot and lse_dot.

    The last two have an axis of directions before those of out and lse.
    """
    out, lse, _ = _attend(call)
    return out[0], lse[0], out[1:], lse[1:]


@_quiet
def _attend(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return out and lse, each before its tangents, and max_score.

    The first two have an axis of 1 + directions: 1 in a forward call.
    """
    p, arrays, moves = call.problem, operands(call), directions(call)
    count, q_heads = 1 + len(moves), p.num_heads_q
    of_out = count, p.batch, p.seqlen_q, q_heads, p.head_dim_v
    out = np.zeros(of_out, dtype_of(call))
    lse = np.zeros((count, p.batch, q_heads, p.seqlen_q), p.lse_dtype)
    lse[0] = -np.inf
    max_score = lse[0].copy()
    results: list[Arrays] = [
        {"out": heads_first("out", x, p), "lse": heads_first("lse", y, p)}
        for x, y in zip(out, lse, strict=True)
    ]
    if p.return_max_score:
        results[0]["max_score"] = heads_first("max_score", max_score, p)
    for part in parts(call, options(call), arrays, moves):
        own, moved = part.of(arrays), [part.of(x) for x in moves]
        written = [part.of(x) for x in results]
        tiles.forward(
            **part.bounded(own),
            directions=[part.bounded(x) for x in moved],
            results=written,
            small=part.kind == Kind.SMALL and p.tangents is None,
            **part.options,
        )
        if part.flagged is not None:
            nan.forward(part.flagged, own["v"], written)
        if "score_mod" in part.options:
            part = part.checked(written[0]["lse"], own["k"].shape[-2])
        for rows in part.rows():
            reference.forward(rows, own, moved, written)
    return out, lse, max_score


@_quiet
def backward(call: Call) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv, like q, k and v; those of logits if requested."""
    given, (results, of_logits, _) = call.gradients, _differentiate(call)
    gradients = [_into(given.get(f"d{x}"), y) for x, y in results.items()]
    return *gradients, *of_logits


@_quiet
def double_backward(call: Call) -> tuple[np.ndarray, ...]:
    """Return d2q, d2k, d2v and ddout; of logits and lse if requested."""
    p, (results, of_logits, ddlse) = call.problem, _differentiate(call)
    found = *results.values(), *of_logits
    if not p.return_ddlse:
        return found
    assert ddlse is not None
    return *found, ddlse.reshape(p.batch, p.num_heads_q, p.seqlen_q)


def _differentiate(
    call: Call,
) -> tuple[Arrays, list[np.ndarray], np.ndarray | None]:
    """Gradients of the arrays, of logits if requested, and of dlse.

    A double backward has the last one, and of the arrays dout too.
    """
    p, arrays, moves = call.problem, operands(call), directions(call)
    second, of_call = p.direction == "double_backward", options(call)
    names = ("q", "k", "v", "dout") if second else ("q", "k", "v")
    results = {
        x: np.zeros(call.arrays[x].shape, dtype_of(call)) for x in names
    }
    written = {x: heads_first(x, y, p) for x, y in results.items()}
    if second:
        written["dlse"] = np.zeros_like(arrays["lse"])
    of_logits = zeros_of_logits(of_call)
    by_tiles, write_nan, by_reference = (
        getattr(x, p.direction) for x in (tiles, nan, reference)
    )
    largest = LARGEST_COTANGENT if second else LARGEST_VALUE
    for part in parts(call, of_call, arrays, moves, largest):
        own, moved = part.of(arrays), [part.of(x) for x in moves]
        bounded = part.bounded(own)
        found = by_tiles(*map(part.bounded, moved), **bounded, **part.options)
        if part.flagged is not None:
            write_nan(part.flagged, own, found)
        for rows in part.rows():
            by_reference(rows, *moved, own, found)
        for name, x in part.of(written).items():
            x[...] = found[name]
        for name, x in part.of(of_logits).items():
            x += found[name]
    asked = [
        _like(call.options[name], of_logits[name])
        for name, argument in LOGITS.items()
        if getattr(p, argument)
    ]
    asked += gradients(call, of_call.get("score_mod"))
    return results, asked, written.get("dlse")


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
    if not (p.score_mod is p.mask_mod is None):
        functions = Recorded(call).functions()
        for name in functions["mod_arrays"]:
            options.pop(name, None)
        options |= functions
    options.setdefault("cache_seqlens", call.cache_seqlens)
    if p.lse_dtype == "float32":
        options["largest_score"] = LARGEST_FLOAT32
    if p.kvcache and p.kvcache.rotary:
        given |= rotated(call, options)
    v_cache: np.ndarray | None = as_float8(given["v_cache"])
    if p.kvcache and p.kvcache.latent:
        v_cache = None
        options |= {"head_dim_v": p.head_dim_v}
    out, lse = kvcache.forward_kvcache(
        given["q"],
        as_float8(given["k_cache"]),
        v_cache,
        k_new=given.get("k_new"),
        v_new=given.get("v_new"),
        **scalars(p),
        **options,
    )
    if call.rank == 3:
        out, lse = out[None], lse[None]
    return _into(call.out, _round(out, call)), lse.astype(p.lse_dtype)


def finish() -> None:
    """Nothing is left to wait for."""


def _round(array: np.ndarray, call: Call) -> np.ndarray:
    """Convert to the dtype of the inputs, C-contiguous, native bytes."""
    return array.astype(dtype_of(call), order="C")


def _into(given: np.ndarray | None, result: np.ndarray) -> np.ndarray:
    """The user's array with the result, if there is one, else the result."""
    if given is None:
        return result
    given[...] = result
    return given


def _like(array: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """A gradient with the shape and the dtype of its array."""
    dtype = array.dtype.newbyteorder("=")
    gradient = np.broadcast_to(gradient, np.shape(gradient) or array.shape)
    return gradient.reshape(array.shape).astype(dtype, order="C")
