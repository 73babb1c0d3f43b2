"""Scores of a row that share a large offset, as of a row masked by -1e9.

lse = m + log l is rounded to a multiple of an ulp of the offset. All
derivatives are still those of calls without offsets (docs/guide/accuracy.md,
"The rounding of lse").
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers import calls, expected
from helpers.backends import CUPY, EMULATED, NUMPY, on_kernels
from helpers.compare import (
    assert_at_most,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import (
    call_double_backward,
    call_jvp,
    expected_double_backward,
    expected_jvp,
    tangents,
)
from helpers.dtypes import DTYPES, lse_dtype
from helpers.option_cases import KINDS
from helpers.packed import packed_inputs, sum_of
from helpers.row_offsets import row_offsets

HOPPER = {"on": Emulation("sm_90a")}
KERNELS = {
    **KINDS,
    # One column more than prepare/lse_rests.cu has in a step.
    "simt": {**KINDS["simt"], "head_dim": 33},
    "mma16": {"dtype": "float16"},
    "wgmma": {"dtype": "bfloat16", **HOPPER},
    "wgmma16": {"dtype": "float16", **HOPPER},
}
ON_NUMPY = {dtype: {"dtype": dtype} for dtype in ("float32", "float64")}


def on(kernels):
    """Parametrise by backend and kind, those of kernels and of NumPy."""
    pairs = [
        (NUMPY, ON_NUMPY),
        *((backend, kernels) for backend in (EMULATED, CUPY)),
    ]
    return pytest.mark.parametrize(
        ("backend", "fields"),
        [
            pytest.param(*backend.values, fields, marks=backend.marks,
                         id=f"{backend.id}-{kind}")
            for backend, kinds in pairs
            for kind, fields in kinds.items()
        ],
    )  # fmt: skip


def case_of(fields, **more):
    return Case(
        batch=2, seqlen_q=20, seqlen_k=70, num_heads_q=2, scale=0.5,
        values="halves", layout="unlike", **fields, **more,
    )  # fmt: skip


def states_of(case, bias, **options):
    """Return the exact out, and lse."""
    q, k, v, _ = inputs(case)
    return cuflash.forward(
        q, k, v, **case.meaning(), bias=bias, return_lse=True, **options
    )


@on(KERNELS)
def test_gradients(backend, fields):
    case = case_of(fields)
    bias, (q, k, v, dout) = row_offsets(case), inputs(case)
    given = {"bias": backend.place(bias), "return_dbias": True}
    got = calls.backward(
        backend, case, dout, q, k, v, *states_of(case, bias), **given
    )
    want = expected.backward(dout, q, k, v, scale=0.5, bias=0 * bias)
    assert_gradients_match(got, want, replace(case, arrays_of=("bias",)))


@on({kind: KERNELS[kind] for kind in ("fma", "mma16", "wgmma16")})
def test_gradients_with_other_options(backend, fields):
    """What rounding took from lse is found in the scores of all options.

    Scores are multiples of 32 or 0, so those of a softcap of 1 are -1, 0 or
    1, exactly: tanh(32) rounds to 1 in float64.
    """
    case = case_of(
        fields, softcap=1.0, window=(40, 9),
        arrays_of=("mask", "segment_ids_k", "segment_ids_q"),
    )  # fmt: skip
    case = replace(case, scale=32.0)
    bias, (q, k, v, dout) = row_offsets(case), inputs(case)
    got = calls.backward(
        backend, case, dout, q, k, v, *states_of(case, bias),
        bias=backend.place(bias),
    )  # fmt: skip
    want = expected.backward(dout, q, k, v, **case.meaning(), bias=0 * bias)
    assert_gradients_match(got, want[:3], replace(case, arrays_of=()))


@on({kind: KERNELS[kind] for kind in ("fma", "mma16", "wgmma16")})
def test_gradients_of_forward(backend, fields):
    """From the kernels' own lse, beside offsets of equal scores.

    Those that take S log2(e) as exponents of 2 lose digits of others.
    """
    case = case_of(fields)
    bias, (q, k, v, dout) = row_offsets(case, exact=(0.0,)), inputs(case)
    given = {"bias": backend.place(bias)}
    states = calls.forward(backend, case, q, k, v, **given)
    got = calls.backward(backend, case, dout, q, k, v, *states, **given)
    want = expected.backward(dout, q, k, v, scale=0.5)
    assert_gradients_match(got, want, case)


@on({kind: KERNELS[kind] for kind in (*KINDS, "mma16") if kind != "mma"})
def test_derivatives(backend, fields):
    """Of `jvp` and `double_backward`, beside offsets as of forward."""
    case = case_of(fields)
    bias, direction = row_offsets(case, exact=(0.0,)), tangents(case)
    out, lse = states_of(case, bias)
    given = {"bias": bias, "out": out, "lse": lse}
    got = call_double_backward(case, direction, backend, **given)
    for name, want in expected_double_backward(case, direction).items():
        assert_matches(got[name], want, f"second {name}", case)
    *_, out_dot, lse_dot = call_jvp(case, direction, backend, bias=bias)
    of_out, of_lse = expected_jvp(case, direction)
    assert_matches(out_dot, of_out, "out_dot", case)
    assert_matches(lse_dot, of_lse, "lse_dot", case)


@on({name: KERNELS[name] for name in ("simt", "wgmma")})
def test_a_sink_as_large(backend, fields):
    """Beside rows that share the head's offset; dsink, too."""
    case = case_of(fields)
    offset = np.array([1, -1]) * 2.0 ** (51 if case.dtype == "float64" else 22)
    sink = np.array([0.5, -0.5])
    dtype = lse_dtype(DTYPES[case.dtype])
    shared = {
        "bias": np.tile(offset[:, None, None], (20, 70)).astype(dtype),
        "sink": (offset + sink).astype(dtype),
    }
    q, k, v, dout = inputs(case)
    given = {name: backend.place(x) for name, x in shared.items()}
    got = calls.backward(
        backend, case, dout, q, k, v, *states_of(case, **shared), **given,
        return_dsink=True,
    )  # fmt: skip
    want = expected.backward(dout, q, k, v, scale=0.5, sink=sink)
    assert_gradients_match(got, want, replace(case, arrays_of=("sink",)))


@pytest.mark.parametrize("kind", ["mma16", "wgmma16"])
@on_kernels
def test_packed_sequences_beside_a_sink_as_large(backend, kind):
    """Of one key each, which ties with the sink for rows at one distance.

    The first sequence has no slopes; rows nearer or farther are of the key or
    of the sink alone.
    """
    of_q, of_k = (0, 9, 20, 50, 57), (0, 1, 2, 3, 4)
    case = Case(
        batch=1, seqlen_q=57, seqlen_k=4, num_heads_q=2, scale=0.5,
        values="halves", offsets=(of_q, of_k), **KERNELS[kind],
    )  # fmt: skip
    offset = np.array([-1, 1]) * 2.0**22
    slopes = -offset / np.array([[np.inf], [2], [16], [1]])
    sink = offset + [0.5, -0.5]
    (q, k, v, dout), given = packed_inputs(case)
    options = {
        "alibi_slopes": slopes.astype(np.float32),
        "sink": sink.astype(np.float32),
    }
    states = cuflash.forward(
        *given[:3], **case.meaning(), **options, return_lse=True
    )
    placed = {name: backend.place(x) for name, x in options.items()}
    dq, dk, dv, dsink = calls.backward(
        backend, case, given[3], *given[:3], *states, **placed,
        return_dsink=True,
    )  # fmt: skip
    want_dsink = []
    for b, (i, n) in enumerate(itertools.pairwise(of_q)):
        distance = np.arange(n - i)[::-1]
        added = -slopes[b][:, None] * distance - offset[:, None]
        want = expected.backward(
            dout[:, i:n], q[:, i:n], k[:, b : b + 1], v[:, b : b + 1],
            scale=0.5, bias=added.clip(-200, 200)[None, :, :, None],
            sink=sink - offset,
        )  # fmt: skip
        for name, x, one in zip(
            ("dq", "dk", "dv"),
            (dq[i:n], dk[b : b + 1], dv[b : b + 1]),
            want,
            strict=False,
        ):
            assert_matches(x[None], one, name, case)
        want_dsink.append(want[4])
    assert_matches(dsink, sum_of(want_dsink, dsink.shape), "dsink", case)


@on({"simt": KINDS["simt"]})
def test_an_lse_of_more_keys_stays(backend, fields):
    """As in context parallelism: the gradients of half of the keys.

    lse is rounded by half an ulp of 2^13, and P by as much of itself.
    """
    case = case_of(fields)
    bias = np.full((20, 70), 2.0**13, lse_dtype(DTYPES[case.dtype]))
    q, k, v, dout = inputs(case)
    states = states_of(case, bias)
    half = {"bias": backend.place(bias[:, :35])}
    _, _, dv = calls.backward(
        backend, case, dout, q, k[:, :35], v[:, :35], *states, **half
    )
    want, of_sizes = (
        expected.backward(x, q, k, v, scale=0.5)[2] for x in (dout, abs(dout))
    )
    bound = of_sizes.ref * 2.0**-11 + of_sizes.tiny
    assert_at_most(abs(dv - want.ref[:, :35]), bound[:, :35], "dv")


@on({kind: KERNELS[kind] for kind in ("mma16", "wgmma16")})
def test_beside_a_nan_that_they_do_not_see(backend, fields):
    """Kernels compute such rows anew, with the same P."""
    spoiled = tuple((x, (0, 69), "nan") for x in "kv")
    case = case_of(
        fields, causal=True, spoiled=(*spoiled, ("q", (0, 19), "nan"))
    )
    bias, (q, k, v, dout) = row_offsets(case), inputs(case)
    got = calls.backward(
        backend, case, dout, q, k, v, *states_of(case, bias),
        bias=backend.place(bias),
    )  # fmt: skip
    want = expected.backward(
        dout, q, k, v, scale=0.5, causal=True, bias=0 * bias
    )
    assert_gradients_match(got, want[:3], case)


@on({"simt64": KINDS["simt64"]})
def test_packed_sequences_far_from_all_keys(backend, fields):
    """Slopes of 1: lse is below -4,096 where keys are 4,096 tokens away.

    Its rounding alone would put dq off by 2^-41 of itself.
    """
    case = Case(batch=2, seqlen_q=4200, seqlen_k=7, head_dim=4, head_dim_v=4,
                scale=0.5, values="halves", **fields)  # fmt: skip
    arrays = inputs(case)
    rows = [x.reshape(-1, 1, 4).astype(np.float64) for x in arrays]
    given = {"alibi_slopes": np.ones(1, np.float32)} | {
        f"cu_seqlens_{x}": np.array([0, n, 2 * n], np.int32)
        for x, n in (("q", 4200), ("k", 7))
    }
    q, k, v, dout = rows
    states = cuflash.forward(q, k, v, **given, scale=0.5, return_lse=True)
    placed = {name: backend.place(x) for name, x in given.items()}
    with backend.running(case):
        dq, _, _ = cuflash.backward(
            *map(backend.place, (dout, q, k, v, *states)), **placed, scale=0.5
        )
    want = expected.backward(
        *(arrays[i].astype(np.float64) for i in (3, 0, 1, 2)),
        alibi_slopes=given["alibi_slopes"], scale=0.5, exact_scores=True,
    )[0]  # fmt: skip
    error = abs(backend.fetch(dq).reshape(want.ref.shape) - want.ref)
    far = error[:, : 4200 - 7 - 4096]
    assert far.max() <= 7 * 4 * 4 * np.finfo(np.float64).eps
