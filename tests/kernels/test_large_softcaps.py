"""The error of a capped score is relative to the score, whatever the cap.

Its bound: tests/helpers/rounding.py.
"""

from dataclasses import replace

import pytest

from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.compare import assert_forward_matches, assert_gradients_match
from helpers.data import Case, inputs
from helpers.derivatives import (
    assert_near,
    call_double_backward,
    call_jvp,
    exact_double_backward,
    exact_jvp,
    tangents,
)
from helpers.option_cases import FAMILIES, sizes

CAPS = [1.0, 50.0, 1e3, 1e5, 1e7, 1e30]

CASES = {
    "wgmma": FAMILIES["wgmma"].case(
        "grouped", "softcap", batch=1, seqlen_q=70, seqlen_k=130
    ),
    "mma": Case("float16", **sizes(1, 30, 40, 1, 1, 64, 64)),
    "simt": Case("bfloat16", **sizes(1, 8, 12, 1, 1, 260, 260)),
    "fma": Case("float32", **sizes(1, 30, 40, 1, 1, 64, 64)),
}
OF_DECODING = {
    "decode": Case("float16", **sizes(1, 2, 600, 1, 1, 64, 64)),
    "decode_simt": Case("float16", **sizes(1, 2, 600, 1, 1, 264, 264)),
}


def arrays(case):
    """Scores up to about 1, 30 and 900, by rows, which share a tile."""
    q, k, v, dout = inputs(case)
    q[:, ::3] /= 30
    q[:, 1::3] *= 30
    return q, k, v, dout


@on_kernels
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("family", [*CASES, *OF_DECODING])
def test_scores_of_many_sizes(backend, family, cap):
    case = replace((CASES | OF_DECODING)[family], softcap=cap, scale=1.0)
    q, k, v, _ = arrays(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_kernels
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("family", CASES)
def test_gradients_of_scores_of_many_sizes(backend, family, cap):
    case = replace(CASES[family], softcap=cap, scale=1.0)
    q, k, v, dout = arrays(case)
    got = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)


@on_kernels
@pytest.mark.parametrize("cap", CAPS)
def test_derivatives(backend, cap):
    case = replace(CASES["mma"], softcap=cap)
    direction = tangents(case)
    out_dot, lse_dot = call_jvp(case, direction, backend)[2:]
    got = {"out_dot": out_dot, "lse_dot": lse_dot}
    assert_near(got, exact_jvp(case, direction), case)
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact_double_backward(case, direction), case)
