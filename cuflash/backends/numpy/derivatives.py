"""Derivatives of calls on NumPy arrays: `jvp` and `double_backward`.

As `attention` runs the other calls: by `numpy_tangents` in float32 or float64,
UNBOUNDED rows by the reference in float64, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cuflash.backends.numpy import (
    nan as numpy_nan,
)
from cuflash.backends.numpy import (
    reference as numpy_reference,
)
from cuflash.backends.numpy import (
    tangents as numpy_tangents,
)
from cuflash.backends.numpy.kinds import LARGEST_COTANGENT
from cuflash.backends.numpy.parts import (
    by_group,
    by_key_heads,
    by_query_heads,
    dtype_of,
    for_blas,
    like,
    operands,
    part_options,
    parts,
    working_dtype,
    zero_gradients,
)
from cuflash.backends.numpy.scores import of_heads
from cuflash.backends.numpy.tangents import Direction
from cuflash.plans import plan
from cuflash.request.problem import Call, Problem

# Overflow and NaN are valid results, whatever the caller's np.errstate.
_quiet = np.errstate(all="ignore")


@_quiet
def jvp(call: Call) -> tuple[np.ndarray, ...]:
    """Return out, lse, out_dot and lse_dot.

    The last two have an axis of directions before those of out and lse.
    """
    p = call.problem
    plan.check(p)
    q, k, v = operands(call, "q", "k", "v")
    directions = _directions(call)
    shape = (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v)
    results = np.zeros((1 + len(directions), *shape), dtype_of(call))
    out, *out_dot = (by_query_heads(x, p) for x in results)
    lse = np.zeros((1 + len(directions), *q.shape[:-1]), q.dtype)
    lse[0] = -np.inf
    for part in parts(call, q, k, v, directions=directions):
        at, keys = part.of_queries, part.of_keys
        moved = [x[at] for x in out_dot], [x[at] for x in lse[1:]]
        written = out[at], lse[0][at], *moved
        numpy_tangents.jvp(
            part.bounded_rows(q),
            part.bounded_keys(k),
            part.bounded_keys(v),
            [part.bounded_direction(x) for x in directions],
            written,
            **part_options(call, part),
        )
        if part.flagged is not None:
            of_out, of_lse = [written[0], *moved[0]], [written[1], *moved[1]]
            numpy_nan.forward(part.flagged, v[keys], of_out, of_lse)
        own = [part.direction_of(x) for x in directions]
        for rows in part.rows():
            numpy_reference.jvp(
                *(rows, q[at], k[keys], v[keys]), own, written, p.scale
            )
    lse = lse.reshape(len(lse), p.batch, p.num_heads_q, p.seqlen_q)
    return results[0], lse[0], results[1:], lse[1:]


@_quiet
def double_backward(call: Call) -> tuple[np.ndarray, ...]:
    """Return d2q, d2k, d2v and ddout; d2bias, d2sink, ddlse if requested."""
    p = call.problem
    plan.check(p)
    q, k, v, out, dout = operands(call, "q", "k", "v", "out", "dout")
    (direction,) = _directions(call)
    given = {
        name: call.arrays[name].reshape(q.shape[:-1]).astype(q.dtype)
        for name in ("lse", "dlse")
        if name in call.arrays
    }
    lse, dlse = given["lse"], given.get("dlse")
    names = "q", "k", "v", "dout"
    results = [np.zeros(call.arrays[x].shape, dtype_of(call)) for x in names]
    d2q, ddout = (by_query_heads(x, p) for x in results[::3])
    d2k, d2v = map(by_key_heads, results[1:3])
    others, ddlse = zero_gradients(call), np.zeros(lse.shape, lse.dtype)
    values = [out, dout] if dlse is None else [out, dout, dlse]
    for part in parts(
        *(call, q, k, v, values, lse),
        directions=[direction],
        largest=LARGEST_COTANGENT,
    ):
        at, keys = part.of_queries, part.of_keys
        found = numpy_tangents.double_backward(
            part.bounded_direction(direction),
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
            numpy_nan.double_backward(
                *(part.flagged, dout[at], v[keys], out[at], found)
            )
        own = part.direction_of(direction)
        for rows in part.rows():
            numpy_reference.double_backward(
                *(rows, own, dout[at], q[at], k[keys], v[keys]),
                *(out[at], lse[at]),
                None if dlse is None else dlse[at],
                p.scale,
                found,
            )
        d2q[at], ddout[at], ddlse[at] = found.d2q, found.ddout, found.ddlse
        d2k[keys], d2v[keys] = found.d2k, found.d2v
        for name, total in others.items():
            of_part = of_heads(total, part.heads)
            of_part += getattr(found, f"d2{name}")
    wanted = {"bias": p.return_dbias, "sink": p.return_dsink}
    results += [like(call.options[x], others[x]) for x in wanted if wanted[x]]
    if p.return_ddlse:
        results.append(ddlse.reshape(p.batch, p.num_heads_q, p.seqlen_q))
    return tuple(results)


def _directions(call: Call) -> list[Direction]:
    """Each direction's tangents, with the axes of `numpy_tiles`."""
    p, given = call.problem, call.directions
    assert p.tangents is not None
    by_heads: dict[str, Callable[[np.ndarray, Problem], np.ndarray]] = {
        "q": by_query_heads,
        "k": lambda x, _: by_key_heads(x),
        "v": lambda x, _: by_key_heads(x),
        "bias": by_group,
        "sink": lambda x, _: x.reshape(1, p.num_heads_kv, p.group_size),
    }

    def one(name: str, number: int) -> np.ndarray | None:
        if name not in given:
            return None
        array = by_heads[name](given[name][number], p)
        array = array.astype(working_dtype(p), copy=False)
        return for_blas(array) if name in "qkv" else array

    return [
        Direction(*(one(name, number) for name in Direction._fields))
        for number in range(p.tangents.count)
    ]
