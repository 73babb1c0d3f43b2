"""Tangents of a case, and the derivatives to expect of a public call.

Arrays are in the public layout. The names of inputs are q, k, v, bias and
sink.
"""

import numpy as np

import cuflash
from cuflash.reference.attention import attention
from cuflash.reference.double_backward import double_backward
from cuflash.reference.jvp import jvp

from . import derivative_rounding
from .backends import NumpyBackend
from .compare import Expected, assert_within
from .data import Emulation, inputs, lse_gradient, unlike
from .dtypes import DTYPES, PRECISION
from .heads import heads_first, heads_last, sum_groups
from .options import of_reference
from .packed import many_sequences

NUMPY = NumpyBackend()
INPUTS = "q", "k", "v", "bias", "sink"
# Options of `Case` by kind: each dtype, and float32 in parts on tensor cores.
KINDS = {name: {"dtype": name} for name in DTYPES} | {
    "tf32x3": {"dtype": "float32", "precision": "tf32x3"}
}
# simt has all of these on all GPUs; mma8 the last one, in part of the calls.
BLOCKS = [(None, None), (16, 8), (8, 16), (16, 16)]
GROUPED = {
    "batch": 2,
    "seqlen_q": 37,
    "seqlen_k": 51,
    "num_heads_q": 6,
    "num_heads_kv": 2,
    "head_dim": 24,
    "head_dim_v": 12,
    "causal": True,
    "scale": -0.3,
    "layout": "unlike",
}
EVERYTHING = {
    **GROUPED,
    "scale": None,
    "seed": 27,  # each pair has a bias of its own
    "softcap": 2.0,
    "window": (20, 9),
    "dropout": 0.25,
    "arrays_of": (
        "alibi_slopes", "bias", "mask", "segment_ids_k", "segment_ids_q",
        "sink",
    ),
}  # fmt: skip
# Many sequences, the last one of several tiles; then tokens of none.
OFFSETS = many_sequences((6, 9), (34, 50))
PACKED = {
    "batch": 1,
    "seqlen_q": OFFSETS[0][-1] + 2,
    "seqlen_k": OFFSETS[1][-1] + 1,
    "num_heads_q": 4,
    "num_heads_kv": 2,
    "head_dim": 24,
    "head_dim_v": 12,
    "causal": True,
    "scale": -0.3,
    "dropout": 0.25,
    "offsets": OFFSETS,
    "layout": "unlike",
    "arrays_of": ("alibi_slopes_of_batches", "sink"),
}
ON = Emulation("sm_80", seed=3)
FAMILIES = {
    "mma": {"dtype": "float16", "on": ON},
    "fma": {"dtype": "float32", "on": ON},
    "dmma": {"dtype": "float64", "on": ON},
    "simt": {"dtype": "float64", "on": Emulation("sm_75", seed=3)},
}


def moving(case):
    """Return a case's inputs that may have tangents, by name."""
    found = dict(zip("qkv", inputs(case), strict=False)) | case.options()
    return {name: found[name] for name in INPUTS if name in found}


def tangents(case, names=INPUTS, count=None):
    """Return tangents of the named inputs that a case has, standard normal.

    count : directions, an axis before the others; None: one, and no axis.
    """
    rng = np.random.default_rng([case.seed, 7])
    lead, found = () if count is None else (count,), {}
    for name, x in moving(case).items():
        tangent = rng.standard_normal((*lead, *x.shape)).astype(x.dtype)
        if name in names:
            found[name] = tangent
            if case.layout == "unlike" and name in "qkv":
                found[name] = unlike(tangent, f"{name}_dot")
    return found


def call_jvp(case, direction, backend=NUMPY, **changed):
    """Return out, lse, out_dot and lse_dot of a public call."""
    given = {f"{x}_dot": direction.get(x) for x in INPUTS}
    arrays = dict(zip("qkv", inputs(case), strict=False))
    options = case.call() | {"return_lse": True}
    asked = arrays | given | options | changed
    return _run(backend, case, cuflash.jvp, asked)


def _run(backend, case, function, asked):
    """Return a call's results as NumPy arrays."""
    placed = {
        name: backend.place(x) if isinstance(x, np.ndarray) else x
        for name, x in asked.items()
    }
    backend.poison()
    with backend.running(case):
        results = function(**placed)
    return tuple(backend.fetch(x) for x in results)


def call_double_backward(case, direction, backend=NUMPY, **changed):
    """Return all second gradients of a public call, by name."""
    given = {f"dd{x}": direction.get(x) for x in INPUTS}
    there = case.options()
    wanted = {f"return_d2{x}": True for x in ("bias", "sink") if x in there}
    q, k, v, dout = inputs(case)
    arrays = {"dout": dout, "q": q, "k": k, "v": v}
    if "out" not in changed or "lse" not in changed:
        arrays["out"], arrays["lse"] = cuflash.forward(
            q, k, v, **case.meaning(), return_lse=True
        )
        if case.layout == "unlike":
            arrays["out"] = unlike(arrays["out"], "out")
    dlse = lse_gradient(case)
    asked = arrays | given | case.call() | wanted | {"dlse": dlse}
    asked |= {"deterministic": case.deterministic} | changed
    asked["return_ddlse"] = True
    results = _run(backend, case, cuflash.double_backward, asked)
    others = [x for x in ("bias", "sink") if asked.get(f"return_d2{x}")]
    names = ["q", "k", "v", "out", *others, "lse"]
    return dict(zip(names, results, strict=True))


def expected_jvp(case, direction):
    """Return the expected out_dot and lse_dot of one direction."""
    q, k, v, _ = inputs(case)
    arrays, options = _of_reference(case, q, k, v)
    given = _heads_first(case, direction)
    with np.errstate(all="ignore"):
        found = jvp(
            *arrays,
            **{f"{name}_dot": x for name, x in given.items()},
            scale=case.scale,
            **options,
        )
    bound = bounds_of(case, given)
    return (
        _expected(case, heads_last(found.out_dot), bound.out_dot),
        _expected(case, found.lse_dot, bound.lse_dot, lse=True),
    )


def expected_double_backward(case, direction):
    """Return the expected second gradients of `call_double_backward`."""
    q, k, v, dout = inputs(case)
    arrays, options = _of_reference(case, q, k, v)
    given = _heads_first(case, direction)
    with np.errstate(all="ignore"):
        out, lse = attention(*arrays, scale=case.scale, **options)
        found = double_backward(
            dout=heads_first(dout).astype(np.float64),
            **dict(zip("qkv", arrays, strict=True)),
            **{f"dd{name}": given.get(name) for name in INPUTS},
            out=out,
            lse=lse,
            dlse=lse_gradient(case),
            scale=case.scale,
            **options,
        )
    heads, bound = case.num_heads_kv, bounds_of(case, given)
    refs = {
        "q": heads_last(found.d2q),
        "k": heads_last(sum_groups(found.d2k, heads)),
        "v": heads_last(sum_groups(found.d2v, heads)),
        "out": heads_last(found.ddout),
        "bias": found.d2bias,
        "sink": found.d2sink,
        "lse": found.ddlse,
    }
    of_results = {"out": bound.out_dot, "lse": bound.lse_dot}
    return {
        name: _expected(
            case,
            ref,
            of_results.get(name) or getattr(bound, name, 0.0),
            lse=name in ("lse", "sink"),
        )
        for name, ref in refs.items()
        if ref is not None
    }


def exact_jvp(case, direction):
    """Return the reference's out_dot and lse_dot by name."""
    found = expected_jvp(case, direction)
    return dict(zip(("out_dot", "lse_dot"), (x.ref for x in found),
                    strict=True))  # fmt: skip


def exact_double_backward(case, direction):
    """Return the reference's second gradients by name."""
    found = expected_double_backward(case, direction)
    return {name: x.ref for name, x in found.items()}


def _of_reference(case, q, k, v):
    """Return q, k and v by heads in float64, and the reference's options."""
    arrays = [
        heads_first(x, case.num_heads_q).astype(np.float64) for x in (q, k, v)
    ]
    options = {n: x for n, x in case.meaning().items() if n != "scale"}
    return arrays, of_reference(q, options)


def _heads_first(case, direction):
    """Return tangents for the reference, in float64."""
    return {
        name: x.astype(np.float64)
        if name in ("bias", "sink")
        else heads_first(x, case.num_heads_q).astype(np.float64)
        for name, x in direction.items()
    }


def bounds_of(case, direction):
    """Return the bounds of a case's results, before they are rounded."""
    q, k, v, dout = (heads_first(x).astype(np.float64) for x in inputs(case))
    options, unit = case.options(), PRECISION[case.dtype].unit
    of = {
        name: derivative_rounding.largest(_wide(options.get(name)))
        for name in ("bias", "sink", "alibi_slopes")
    }
    return derivative_rounding.bounds(
        {"q": q, "k": k, "v": v},
        direction,
        dout,
        lse_gradient(case),
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        unit=2.0**-53 if case.dtype == "float64" else 2.0**-24,
        softcap=case.softcap,
        dropout=case.dropout,
        added=of["bias"]
        + of["sink"]
        + of["alibi_slopes"] * (case.seqlen_q + case.seqlen_k),
        stored=unit,
        group=case.num_heads_q // case.num_heads_kv,
    )


def _wide(array):
    return None if array is None else np.asarray(array, np.float64)


def _expected(case, ref, bound, lse=False):
    """Return an expected result; it is rounded to its dtype at the end."""
    name = case.dtype
    if lse and name != "float64":
        name = "float32"
    unit, floor, _ = PRECISION[DTYPES[name].name]
    return Expected(ref, ref, bound + unit * abs(ref) + floor, 0)


def assert_near(got, want, case):
    """Assert some roundings of the largest finite element; NaN is alike.

    Sums are of at most 51 terms, or of 6 * 2 * 37 * 51 < 150^2 pairs, with
    roundings at random signs, as much as 150 of one sign; a score of at most
    64, slopes included, is rounded to 64 of them. Terms have up to four such
    factors. 16-bit types round each result once more, and out before it
    enters D.
    """
    unit = 2.0**-53 if case.dtype == "float64" else 2.0**-24
    stored = PRECISION[case.dtype].unit if "16" in case.dtype else 0.0
    for name, x in want.items():
        exact = np.asarray(x, np.float64)
        largest = abs(exact[np.isfinite(exact)]).max(initial=0)
        bound = (4 * (150 + 64) * unit + 4 * stored) * largest
        assert_within(got[name], exact, bound, name, case)
