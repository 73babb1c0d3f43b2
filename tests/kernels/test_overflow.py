"""Scores that overflow their type become inf or -inf, on every backend.

That type is float32, or float64 for float64 inputs. All scores here are 0
except one query's, so the results of other rows and keys are the same to the
last bit for any scores of that query.
"""

from dataclasses import replace

import numpy as np
import pytest

from helpers import calls
from helpers.backends import (
    CUPY,
    EMULATED,
    NUMPY,
    on_each_kind,
    on_each_kind_with_options,
)
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_bitwise,
    assert_finite,
)
from helpers.data import Case, Emulation, inputs

QUERY, KEY = 7, 3  # QUERY sees the keys up to its own number

_ON = Emulation()

# Two of them multiply to twice the largest power of two, times the scale.
FACTOR = {
    "float16": 2.0**7,  # 2^14 times the scale, which is 2^114
    "bfloat16": 2.0**64,
    "float32": 2.0**64,
    "float64": 2.0**512,
}

_names, _kinds = on_each_kind_with_options.args
_numpy = [
    pytest.param(*NUMPY.values, dtype, "sm_80", id=f"numpy-{dtype}")
    for dtype in ("bfloat16", "float32")
]
on_each_kind_and_numpy = pytest.mark.parametrize(_names, [*_kinds, *_numpy])


def case_of(dtype, on=_ON, **changes):
    scale = 2.0**114 if dtype == "float16" else 1.0
    return Case(dtype, seqlen_q=20, seqlen_k=20, causal=True, scale=scale,
                deterministic=True, on=on, **changes)  # fmt: skip


def results(backend, case, of_q, of_k, keys=KEY):
    """Return out, lse, dq, dk, dv; the query scores scale * of_q * of_k."""
    q, k, v, dout = inputs(case)
    q[...], k[...] = 0, 0
    q[:, QUERY, :, 0], k[:, keys, :, 0] = of_q, of_k
    out, lse = calls.forward(backend, case, q, k, v)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    return out, lse.swapaxes(1, 2)[..., None], *grads[:3]


def check_overflow(backend, case, factor):
    """Check rows and keys that read a score of inf, and all others."""
    got = results(backend, case, factor, factor)
    want = results(backend, case, 0, factor)
    names = "out", "lse", "dq", "dk", "dv"
    for name, x, sound in zip(names, got, want, strict=True):
        bad = np.zeros(x.shape, bool)
        bad[:, slice(QUERY + 1) if name in ("dk", "dv") else QUERY] = True
        assert_all(
            (np.isposinf if name == "lse" else np.isnan)(
                x[bad].astype(np.float64)
            ),
            True,
            "name",
            name,
        )
        if backend.name == "numpy":
            # BLAS adds a row's products in an order that may depend on how
            # many rows there are: two orders of n terms differ by at most
            # 2 n units roundoff of their sizes, here of the largest result.
            unit = np.finfo(np.promote_types(x.dtype, np.float32)).eps / 2
            sizes = np.abs(sound[~bad].astype(np.float64))
            largest = sizes[np.isfinite(sizes)].max(initial=0.0)
            bound = 2 * case.seqlen_k * unit * largest
            assert_allclose(x[~bad], sound[~bad], name, atol=bound)
        else:
            assert_bitwise(x[~bad], sound[~bad], name)


@on_each_kind
def test_a_product_past_the_largest_number(backend, dtype, on):
    check_overflow(backend, case_of(dtype, on), FACTOR[dtype])


@on_each_kind
def test_a_scaled_score_past_the_largest_number(backend, dtype, on):
    case = case_of(dtype, on)
    case = replace(case, scale=4 * case.scale)
    check_overflow(backend, case, FACTOR[dtype] / 2)


@on_each_kind
def test_a_product_past_it_that_is_scaled_down(backend, dtype, on):
    """Except float16, whose products fit in float32."""
    if dtype != "float16":
        case = replace(case_of(dtype, on), scale=2.0**-20)
        check_overflow(backend, case, FACTOR[dtype])


@pytest.mark.parametrize("backend", [EMULATED, CUPY])
@pytest.mark.parametrize(
    "case",
    [
        case_of("float32", precision="tf32x3"),
        case_of("float16", head_dim=320, head_dim_v=16),
        case_of("bfloat16", Emulation("sm_90a"), head_dim=256, head_dim_v=256),
    ],
    ids=["tf32x3", "wide_heads", "wide"],
)
def test_on_other_kernels(backend, case):
    check_overflow(backend, case, FACTOR[case.dtype])


@on_each_kind_and_numpy
def test_beside_a_sink(backend, dtype, on):
    case = case_of(dtype, on, arrays_of=("sink",))
    check_overflow(backend, case, FACTOR[dtype])


@on_each_kind_and_numpy
def test_a_bias_past_the_largest_number(backend, dtype, on):
    """With a score of half of it; float32's, also of 16-bit types."""
    case = case_of(dtype, on)
    factor = 2.0**63
    bias = np.zeros((20, 20), np.float32)
    bias[QUERY, KEY] = 2.0**127
    q, k, v, _ = inputs(case)
    q[...], k[...] = 0, 0
    q[:, QUERY, :, 0], k[:, KEY, :, 0] = factor, 2 * factor
    out, lse = calls.forward(backend, case, q, k, v, bias=backend.place(bias))
    assert np.isposinf(lse[0, 0, QUERY])
    assert_all(out[0, QUERY], np.nan, "out[0, QUERY]", case)
    assert_finite(np.delete(lse[0, 0], QUERY), "the other lse", case)


def check_as_half(backend, case, of_k):
    """Check that a score is worth what half of it is, which is a number."""
    factor = FACTOR[case.dtype]
    got = results(backend, case, factor, of_k)
    *want, dk, dv = results(backend, case, factor / 2, of_k)
    want += 2 * dk, dv  # of no other query is dk, as theirs are 0
    for a, b in zip(got, want, strict=True):
        assert_arrays_equal(a, b, "a")


@on_each_kind_and_numpy
def test_a_softcap_takes_it_back(backend, dtype, on):
    case = replace(case_of(dtype, on), softcap=5.0)
    check_as_half(backend, case, FACTOR[dtype])


@on_each_kind
def test_one_score_of_minus_infinity_has_no_weight(backend, dtype, on):
    check_as_half(backend, case_of(dtype, on), -FACTOR[dtype])


@on_each_kind
def test_lse_identifies_a_row_of_minus_infinity(backend, dtype, on):
    """And its weights are 0, as in a row without keys."""
    case, factor = case_of(dtype, on), FACTOR[dtype]
    got = results(backend, case, factor, -factor, keys=slice(None))
    sound = results(backend, case, 0, -factor, keys=slice(None))
    out, lse, dq = (x[:, QUERY] for x in got[:3])
    assert_all(lse, -np.inf, "lse", case)
    assert_all(out, 0, "out", case)
    assert_all(dq, 0, "dq", case)
    for a, b in zip(got[:3], sound[:3], strict=True):
        assert_bitwise(*(np.delete(x, QUERY, 1) for x in (a, b)), "others")
    for a, b in zip(got[3:], sound[3:], strict=True):
        assert_bitwise(a[:, QUERY + 1 :], b[:, QUERY + 1 :], "others")
