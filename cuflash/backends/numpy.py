"""Runs calls on NumPy arrays with the reference's tiled functions.

Everything is computed in float64 and finally rounded to the arrays' dtype.
Scores have the range of the kernels' scores: float32, or float64 for float64
arrays. Heads become leading axes, (batch, num_heads_kv, group_size, seqlen,
d), so that the query heads of a group share the keys without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from cuflash import plan
from cuflash.problem import Call, Problem
from cuflash.reference import backward as backward_of
from cuflash.reference import forward as forward_of
from cuflash.reference import kvcache
from cuflash.reference.dropout import Dropout
from cuflash.reference.packed import spans
from cuflash.reference.rotary import apply_rotary as apply_rotary_to
from cuflash.reference.tile_state import TileState

DEFAULT_BLOCK = 128  # a tile's scores in float64 are 128 KiB
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

# Overflow and NaN are valid results, whatever the caller's np.errstate.
_quiet = np.errstate(all="ignore")


@_quiet
def forward(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return out (batch, seqlen_q, num_heads_q, head_dim_v), and lse."""
    problem = call.problem
    plan.check(problem)
    q = _queries(call.arrays["q"], problem)
    k = _keys(call.arrays["k"], problem)
    v = _keys(call.arrays["v"], problem)
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    for part in _parts(call):
        rows, keys = part.queries, part.keys
        out[..., rows, :], lse[..., rows] = forward_of.query_outer(
            q[..., rows, :], k[..., keys, :], v[..., keys, :], **part.options
        )
    result = _round(_tokens_first(out, problem), call)
    if call.out is not None:
        call.out[...] = result
        result = call.out
    shape = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    return result, lse.reshape(shape).astype(problem.lse_dtype)


@_quiet
def backward(call: Call) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv, like q, k and v; dbias, dsink if requested."""
    problem = call.problem
    plan.check(problem)
    q, out, dout = (
        _queries(call.arrays[name], problem) for name in ("q", "out", "dout")
    )
    k, v = (_keys(call.arrays[name], problem) for name in ("k", "v"))
    lse = call.arrays["lse"].reshape(q.shape[:-1]).astype(np.float64)
    dlse = call.arrays.get("dlse")
    if dlse is not None:
        dlse = dlse.reshape(q.shape[:-1]).astype(np.float64)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    others: dict[str, np.ndarray | float] = {"bias": 0.0, "sink": 0.0}
    for part in _parts(call):
        rows = (..., part.queries, slice(None))
        keys = (..., part.keys, slice(None))
        lse_rows = lse[rows[:-1]]
        if problem.lse_dtype == "float32":
            lse_rows = _unrounded(lse_rows, q[rows], k[keys], part.options)
        dq[rows], dk[keys], dv[keys], *rest = backward_of.key_outer(
            *(dout[rows], q[rows], k[keys], v[keys], out[rows], lse_rows),
            dlse=None if dlse is None else dlse[rows[:-1]],
            **part.options,
        )
        for name in others:
            if name in part.options:
                others[name] = others[name] + rest.pop(0)
    gradients = (
        _result("dq", _tokens_first(dq, problem), call),
        _result("dk", dk.sum(axis=2).swapaxes(1, 2), call),
        _result("dv", dv.sum(axis=2).swapaxes(1, 2), call),
    )
    wanted = {"bias": problem.return_dbias, "sink": problem.return_dsink}
    return gradients + tuple(
        _like(call.options[name], others[name])
        for name in others
        if wanted[name]
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
    result = _round(rotated, call)
    if call.out is not None:
        call.out[...] = result
        result = call.out
    return result


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
    result = _round(out, call)
    if call.out is not None:
        call.out[...] = result
        result = call.out
    return result, lse.astype(p.lse_dtype)


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


class _Part(NamedTuple):
    """A range of queries and keys that is computed at once, with options."""

    queries: slice
    keys: slice
    options: dict


def _parts(call: Call) -> Iterator[_Part]:
    """The whole call, or each of its packed sequences."""
    p, options = call.problem, _options(call)
    if p.num_sequences is None:
        yield _Part(slice(None), slice(None), options)
        return
    for number, queries, keys in spans(
        call.options["cu_seqlens_q"],
        call.options["cu_seqlens_k"],
        p.seqlen_q,
        p.seqlen_k,
        p.max_seqlen_q,
        p.max_seqlen_k,
    ):
        own = dict(options)
        if "dropout" in own:
            own["dropout"] = own["dropout"]._replace(batch=number)
        slopes = call.options.get("alibi_slopes")
        if slopes is not None and np.ndim(slopes) == 2:
            own["alibi_slopes"] = own["alibi_slopes"][number, None]
        yield _Part(queries, keys, own)


def _options(call: Call) -> dict:
    """The options that are present, in the form the reference expects."""
    p, given = call.problem, call.options
    options = {
        "scale": p.scale,
        "causal": p.causal,
        "window": p.window,
        "block_q": p.block_q or DEFAULT_BLOCK,
        "block_k": p.block_k or DEFAULT_BLOCK,
    }
    if p.lse_dtype == "float32":
        options["largest_score"] = LARGEST_FLOAT32
    if p.softcap:
        options["softcap"] = p.softcap
    for name in ("alibi_slopes", "sink"):
        if name in given:
            heads = np.atleast_2d(given[name]).astype(np.float64)
            groups = (len(heads), p.num_heads_kv, p.group_size)
            options[name] = heads.reshape(groups)
    for name in ("bias", "mask"):
        if name in given:
            options[name] = _by_group(given[name], p)
    for name in ("segment_ids_q", "segment_ids_k"):
        if name in given:
            options[name] = given[name][..., None, None, :]
    if p.dropout:
        batch = np.arange(p.batch)[:, None, None]
        head = np.arange(p.num_heads_q).reshape(p.num_heads_kv, p.group_size)
        options["dropout"] = Dropout(p.dropout, call.seed, batch, head)
    return options


def _by_group(array: np.ndarray, problem: Problem) -> np.ndarray:
    """Split axis 1, heads, into (key head, head in group); 1 stays 1."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    groups = (problem.num_heads_kv, problem.group_size)
    if array.shape[1] == 1:
        groups = (1, 1)
    array = array.reshape(array.shape[0], *groups, *array.shape[2:])
    return array if array.dtype == bool else array.astype(np.float64)


def _like(array: np.ndarray, gradient: np.ndarray | float) -> np.ndarray:
    """A gradient with the shape and the dtype of its array."""
    dtype = array.dtype.newbyteorder("=")
    gradient = np.broadcast_to(gradient, np.shape(gradient) or array.shape)
    return gradient.reshape(array.shape).astype(dtype, order="C")


def _queries(array: np.ndarray, problem: Problem) -> np.ndarray:
    """(batch, seqlen_q, heads, d) as (batch, key head, group, seqlen_q, d)."""
    batch, seqlen_q, _, d = array.shape
    groups = (problem.num_heads_kv, problem.group_size)
    split = array.reshape(batch, seqlen_q, *groups, d)
    return split.transpose(0, 2, 3, 1, 4).astype(np.float64)


def _keys(array: np.ndarray, problem: Problem) -> np.ndarray:
    """(batch, seqlen_k, num_heads_kv, d), broadcast along the group axis."""
    # Converted before broadcasting: converting a broadcast array copies it.
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
    """Convert to the dtype of the inputs, C-contiguous, native bytes."""
    dtype = next(iter(call.arrays.values())).dtype.newbyteorder("=")
    return array.astype(dtype, order="C")


def _result(name: str, gradient: np.ndarray, call: Call) -> np.ndarray:
    """A gradient, rounded: the user's array if it was given."""
    rounded, given = _round(gradient, call), call.gradients.get(name)
    if given is None:
        return rounded
    given[...] = rounded
    return given


def _unrounded(
    lse: np.ndarray, q: np.ndarray, k: np.ndarray, options: dict
) -> np.ndarray:
    """Undo the rounding of lse to float32 if these keys reproduce it.

    In P = exp(S - lse), the absolute error of lse becomes a relative error of
    P: 1e-3 at scores of 1e4, and no correct digit at 1e30. So lse is
    recomputed, and the result is used if it equals the caller's within a
    float32 ulp. It differs if the caller's lse covers more keys than these;
    the caller's is used then.
    """
    no_values = k[..., :0]
    _, exact = forward_of.query_outer(q, k, no_values, **options)
    ulp = np.spacing(np.abs(lse).astype(np.float32))
    return np.where(np.abs(exact - lse) <= ulp, exact, lse)
