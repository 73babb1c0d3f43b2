"""What a call must return: exact results, and a bound for each element.

The results are those of the same call in float64 on NumPy arrays. That has an
error too, which the same analysis bounds: each bound is the sum of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cuflash.api.attention import backward, forward
from cuflash.api.derivatives import double_backward, jvp
from cuflash.api.readout import entropy, weight_sums
from cuflash.api.rotary import apply_rotary
from cuflash.check import bounds, data, exact, options
from cuflash.check.bounds import ARITHMETIC, SIXTEEN_BITS, Arithmetic
from cuflash.check.calls import Call
from cuflash.check.exact import heads_last
from cuflash.plans.record import FAMILIES


class Expected(NamedTuple):
    """A result, and the largest error of each element."""

    want: np.ndarray
    most: np.ndarray


Results = dict[str, Expected]
KINDS = {**ARITHMETIC, **SIXTEEN_BITS}


def expected(call: Call) -> Results:
    """The results of a call by their names."""
    with np.errstate(all="ignore"):
        return _OF[call.direction](call)


def _wide(call: Call) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A call's arrays and options in float64."""
    given = options.of_call(call.options, call.shape, data.NUMPY[call.dtype])
    arrays = {x: y.astype(np.float64) for x, y in data.inputs(call).items()}
    return arrays, options.in_float64(given)


def _both(
    call: Call, bound: Callable[[Arithmetic], dict[str, Any]]
) -> dict[str, Any]:
    """Bounds of the call's arithmetic and of the exact results', added.

    Bounds are linear in the roundoff, of which float64's is `part`.
    """
    arithmetic = KINDS[call.kind]
    part = ARITHMETIC["float64"].unit / arithmetic.unit
    return {x: (1 + part) * y for x, y in bound(arithmetic).items()}


def _pairs(wants: Mapping[str, Any], mosts: Mapping[str, Any]) -> Results:
    return {x: Expected(wants[x], mosts[x]) for x in wants}


def _every(
    call: Call, x: SimpleNamespace, arithmetic: Arithmetic
) -> SimpleNamespace:
    """`bounds.every_bound`, with the error of a softcap's slope."""
    if x.cap is not None:
        u, width = arithmetic.unit, x.q.shape[-1]
        moved = (arithmetic.product(width) * x.sizes + u * x.steps) / x.cap
        x = SimpleNamespace(**{**vars(x), "slope_error": 2 * moved + 40 * u})
    group = call.shape.heads // call.shape.heads_kv
    return bounds.every_bound(x, arithmetic, group=group)


# ---- forward, backward ----


def _forward(call: Call) -> Results:
    arrays, given = _wide(call)
    q, k, v = (arrays[x] for x in "qkv")
    out, lse = forward(q, k, v, return_lse=True, **given)
    x = exact.matrices({"q": q, "k": k, "v": v}, given)

    def bound(arithmetic: Arithmetic) -> dict[str, Any]:
        y = _every(call, x, arithmetic)
        return {"out": heads_last(y.out), "lse": y.lse}

    return _pairs({"out": out, "lse": lse}, _both(call, bound))


def _backward(call: Call) -> Results:
    arrays, given = _wide(call)
    if options.PACKED in call.options:
        return _packed(call, arrays, given)
    return _gradients(call, arrays, given)


def _gradients(
    call: Call, arrays: Mapping[str, Any], given: Mapping[str, Any]
) -> Results:
    """The results of forward and backward of one array of sequences."""
    q, k, v, dout = (arrays[x] for x in ("q", "k", "v", "dout"))
    out, lse = forward(q, k, v, return_lse=True, **given)
    asked = options.gradients(given)
    found = backward(dout, q, k, v, out, lse, **given, **asked)
    wants = {"out": out, "lse": lse, **options.by_name(asked, found)}
    x = exact.matrices(arrays, given)

    def bound(arithmetic: Arithmetic) -> dict[str, Any]:
        y = _every(call, x, arithmetic)
        heads = call.shape.heads_kv
        most = {
            "out": heads_last(y.out), "lse": y.lse, "dq": heads_last(y.dq),
            "dk": heads_last(y.dk, heads), "dv": heads_last(y.dv, heads),
        }  # fmt: skip
        if "dbias" in wants:
            most["dbias"] = _of_dbias(x, y, arithmetic)
        if "dsink" in wants:
            most["dsink"] = _of_dsink(x, y, arithmetic)
        if "dtable" in wants:
            most["dtable"] = _of_dtable(x, y, arithmetic, wants["dtable"])
        return most

    return _pairs(wants, _both(call, bound))


def _packed(
    call: Call, arrays: Mapping[str, Any], given: Mapping[str, Any]
) -> Results:
    """As of each sequence alone."""
    alone = options.of_a_sequence(given)
    ends = {
        "q": options.offsets(call.shape.seqlen_q),
        "k": options.offsets(call.shape.seqlen_k),
    }
    like = {"q": "q", "dout": "q", "k": "k", "v": "k"}
    parts = []
    for i in range(len(ends["q"]) - 1):
        tokens = {x: slice(y[i], y[i + 1]) for x, y in ends.items()}
        if tokens["q"].start == tokens["q"].stop:
            continue
        one = {x: arrays[x][None, tokens[y]] for x, y in like.items()}
        parts.append(_gradients(call, one, alone))
    return {
        name: Expected(*(
            np.concatenate([part[name][j][0] for part in parts], axis)
            for j in range(2)
        ))
        for name, axis in {
            "out": 0, "lse": 1, "dq": 0, "dk": 0, "dv": 0
        }.items()
    }  # fmt: skip


def _of_scores(x: Any, y: Any, arithmetic: Arithmetic) -> tuple[Any, Any]:
    """dS before scale and slope, and its errors."""
    h = arithmetic.stored
    z = getattr(x, "z", 1.0)
    ds = x.p * x.part
    error = (y.eta + 5 * arithmetic.unit + 2 * h) * np.abs(ds)
    error = error + x.p * (y.dp * z + y.delta) + arithmetic.floor * (x.p > 0)
    return ds, error


def _of_dbias(x: Any, y: Any, arithmetic: Arithmetic) -> Any:
    """Errors of sums of dS over batch and queries."""
    ds, error = _of_scores(x, y, arithmetic)
    count = ds.shape[0] * ds.shape[2]
    error = error + count * arithmetic.unit * np.abs(ds)
    whole = arithmetic.stored * np.abs(ds.sum(axis=(0, 2), keepdims=True))
    return (error.sum(axis=(0, 2), keepdims=True) + whole)[0]


def _of_dtable(x: Any, y: Any, arithmetic: Arithmetic, want: Any) -> Any:
    """Errors of sums of dS over all pairs that read an element, in float32."""
    ds, error = _of_scores(x, y, arithmetic)
    counts = options.sums_of_table(np.ones_like(ds))
    sizes = options.sums_of_table(np.abs(ds))
    rounded = 2.0**-24 * np.abs(want)  # whatever the call's dtype
    sums = counts * arithmetic.unit * sizes
    return options.sums_of_table(error) + sums + rounded


def _of_dsink(x: Any, y: Any, arithmetic: Arithmetic) -> Any:
    """Errors of sums of P D over batch and queries."""
    u = arithmetic.unit
    row = x.lse[..., None]
    eta = y.lse[..., None] + 3 * u * (np.abs(x.sink) + np.abs(row)) + 8 * u
    count = row.shape[0] * row.shape[2]
    error = (eta + count * u) * np.abs(x.delta) + y.delta
    return (x.p_sink * error).sum(axis=(0, 2, 3))


# ---- derivatives ----


def _of_tangents(call: Call) -> tuple[Any, Any, dict[str, Any]]:
    """Arrays, options, and the bounds of both derivatives."""
    arrays, given = _wide(call)
    x = exact.matrices(arrays, given)
    exact.with_tangents(x, arrays)
    heads = call.shape.heads_kv
    group = call.shape.heads // heads
    # mma8 takes W as it is (docs/guide/accuracy.md).
    record = FAMILIES[call.family] if call.family else None
    relative = record is None or record.folder != "mma8"

    def bound(arithmetic: Arithmetic) -> dict[str, Any]:
        out_dot, lse_dot, d2q, d2k, d2v = bounds.derivative_bounds(
            x, arithmetic, group, relative
        )
        y = bounds.every_bound(x, arithmetic, bounds.DERIVATIVES_WIDE)
        out_dot = heads_last(out_dot)
        return {
            "out": heads_last(y.out), "lse": y.lse,
            "out_dot": out_dot, "lse_dot": lse_dot,
            "d2q": heads_last(d2q), "d2k": heads_last(d2k, heads),
            "d2v": heads_last(d2v, heads), "ddout": out_dot,
        }  # fmt: skip

    return arrays, given, _both(call, bound)


def _jvp(call: Call) -> Results:
    arrays, given, mosts = _of_tangents(call)
    moved = (arrays[x] for x in ("q", "k", "v", "q_dot", "k_dot", "v_dot"))
    found = jvp(*moved, return_lse=True, **given)
    names = "out", "lse", "out_dot", "lse_dot"
    return _pairs(dict(zip(names, found, strict=True)), mosts)


def _double_backward(call: Call) -> Results:
    arrays, given, mosts = _of_tangents(call)
    q, k, v, dout = (arrays[x] for x in ("q", "k", "v", "dout"))
    out, lse = forward(q, k, v, return_lse=True, **given)
    moved = (arrays[f"{x}_dot"] for x in "qkv")
    found = double_backward(*moved, dout, q, k, v, out, lse, **given)
    names = "d2q", "d2k", "d2v", "ddout"
    return _pairs(dict(zip(names, found, strict=True)), mosts)


# ---- caches ----


def _kvcache(call: Call) -> Results:
    """As forward of each sequence alone."""
    _, given = _wide(call)
    outs, lses = [], []
    for arrays in data.sequences(call):
        q, k, v = (arrays[x] for x in "qkv")
        out, lse = forward(q, k, v, return_lse=True, **given)
        x = exact.matrices(arrays, given)

        def bound(arithmetic: Arithmetic, x: Any = x) -> dict[str, Any]:
            y = _every(call, x, arithmetic)
            return {"out": heads_last(y.out), "lse": y.lse}

        mosts = _both(call, bound)
        outs.append(Expected(out, mosts["out"]))
        lses.append(Expected(lse, mosts["lse"]))
    return {"out": _joined(outs), "lse": _joined(lses)}


def _joined(parts: list[Expected]) -> Expected:
    return Expected(*map(np.concatenate, zip(*parts, strict=True)))


# ---- what reads or joins the results of forward ----


def _readouts(call: Call) -> Results:
    """weights, weight_sums and entropy."""
    arrays, given = _wide(call)
    q, k, v = (arrays[x] for x in "qkv")
    x = exact.matrices({"q": q, "k": k, "v": v}, given)
    lse = forward(q, k, v, return_lse=True, **given)[1]
    wants = {
        "weights": x.p,
        "weight_sums": weight_sums(q, k, lse, **given),
        "entropy": entropy(q, k, lse, **given),
    }
    log_p = np.abs(x.s - x.lse[..., None])

    def bound(arithmetic: Arithmetic) -> dict[str, Any]:
        y = _every(call, x, arithmetic)
        eta, u = y.eta + arithmetic.unit, arithmetic.unit
        rows, keys = x.p.shape[-2:]
        # -sum P log P: P is off by eta, log P by no more; then the sum.
        of_entropy = x.p * (eta * (log_p + 1) + (keys + 4) * u * log_p)
        return {
            "weights": x.p * eta,
            "weight_sums": (x.p * (eta + rows * u)).sum(-2),
            "entropy": of_entropy.sum(-1),
        }

    return _pairs(wants, _both(call, bound))


def _merge(call: Call) -> Results:
    """As forward with the keys of both halves."""
    results = _forward(call)
    out, lse = results["out"], results["lse"]
    u, h = KINDS[call.kind].unit, KINDS[call.kind].stored
    # Its weights, exp(lse_i - lse), are off by u (2 |lse| + 6) and by the
    # errors of lse; both halves round their out. |v| is at most `largest`.
    values = data.inputs(call)["v"].astype(np.float64)
    largest = np.abs(values).max(axis=(1, 2, 3), keepdims=True)
    size = np.abs(lse.want) + np.log(call.shape.seqlen_k)
    own = u * (2 * size + 6) + 2 * lse.most
    of_out = 2 * out.most + 2 * own.swapaxes(1, 2)[..., None] * largest
    of_out = of_out + 2 * h * largest
    return {
        "out": Expected(out.want, of_out),
        "lse": Expected(lse.want, 2 * lse.most + own),
    }


def _rotary(call: Call) -> Results:
    """Two products and a sum, each rounded; then the result."""
    q = data.inputs(call)["q"].astype(np.float64)
    cos, sin = (x.astype(np.float64) for x in data.rotary_tables(call))
    want = apply_rotary(q, cos, sin)
    first, second = np.abs(np.split(q, 2, axis=-1))
    c, s = (np.abs(x)[:, None] for x in (cos, sin))
    sizes = np.concatenate(
        [first * c + second * s, second * c + first * s], -1
    )
    u, h = KINDS[call.kind].unit, KINDS[call.kind].stored
    return {
        "out": Expected(want, (3 * u + h) * sizes + KINDS[call.kind].floor)
    }


_OF: dict[str, Callable[[Call], Results]] = {
    "forward": _forward,
    "backward": _backward,
    "jvp": _jvp,
    "double_backward": _double_backward,
    "kvcache": _kvcache,
    "readouts": _readouts,
    "merge": _merge,
    "rotary": _rotary,
}
