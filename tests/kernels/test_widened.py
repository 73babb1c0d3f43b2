"""bfloat16 on sm_75: float32 calls on copies, rounded once."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers.backends import EMULATED
from helpers.checks import (
    check_double_backward,
    check_forward,
    check_gradients,
    check_jvp,
)
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import tangents
from helpers.option_cases import ALL

ON = Emulation("sm_75", num_sms=3, seed=7)
# The programs of test_sm75_float32.py.
CASE = Case("bfloat16", 1, 33, 49, 2, 1, 90, 96, causal=True, on=ON)

emulated = pytest.mark.parametrize("backend", [EMULATED])


def rounded(found, dtype):
    return [x.astype(dtype) for x in found]


@emulated
def test_in_arrays_that_the_user_gives(backend):
    """The bits of float32 calls, rounded: of any strides, without batch."""
    q, k, v, dout = (x[0] for x in inputs(CASE))
    wide = rounded((q, k, v, dout), np.float32)
    made = [np.ones((2, *x.shape), q.dtype)[::-1][0] for x in (q, k, v, dout)]
    with backend.running(CASE):
        out, lse = cuflash.forward(
            q, k, v, causal=True, return_lse=True, out=made[3]
        )
        want, same = cuflash.forward(*wide[:3], causal=True, return_lse=True)
        assert out is made[3]
        assert_bitwise(out, want.astype(q.dtype), "out")
        assert_bitwise(lse, same, "lse")
        got = cuflash.backward(
            dout, q, k, v, out, lse, causal=True,
            dq=made[0], dk=made[1], dv=made[2],
        )  # fmt: skip
        want = cuflash.backward(
            wide[3], *wide[:3], out.astype(np.float32), lse, causal=True
        )
    for x, y, given in zip(got, rounded(want, q.dtype), made[:3], strict=True):
        assert x is given
        assert_bitwise(x, y, "gradients")


@emulated
def test_weights_and_their_gradients(backend):
    q, k, _, _ = inputs(CASE)
    wide = rounded((q, k), np.float32)
    with backend.running(CASE):
        _, lse = cuflash.forward(*wide, wide[1], return_lse=True)
        got = cuflash.weights(q, k, lse)
        want = cuflash.weights(*wide, lse)
        assert_bitwise(got, want.astype(got.dtype), "weights")
        same = got.astype(want.dtype)
        got = cuflash.weights_backward(got, q, k, lse)
        want = cuflash.weights_backward(same, *wide, lse)
    for x, y in zip(got, want, strict=True):
        assert_bitwise(x, y.astype(x.dtype), "gradients")


@emulated
def test_all_options(backend):
    case = replace(CASE, **ALL)
    check_forward(backend, case)
    check_gradients(backend, case)


@emulated
def test_derivatives(backend):
    check_jvp(backend, CASE, tangents(CASE))
    check_double_backward(backend, CASE, tangents(CASE))
