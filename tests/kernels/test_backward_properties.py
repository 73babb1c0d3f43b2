"""backward against the float64 reference, for any shape."""

from dataclasses import replace

import numpy as np

import cuflash
import strategies
from helpers import calls
from helpers.checks import check_gradients, check_gradients_of_forward
from helpers.compare import assert_all, assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.heads import visible


@on_each_backend(strategies.cases, each={"dtype": DTYPES}, wide=True)
def test_is_the_gradient(backend, case):
    """With the NumPy path's out and lse; most tests use the backend's."""
    check_gradients(backend, case)


# Rows of few distinct dS, whose roundings are alike.
ALIKE = Case(
    "bfloat16", 1, 65, 187, 4, 2, 32, 64, values="attained", seed=1083829557,
    on=Emulation("sm_90a", resident=1, num_sms=1),
)  # fmt: skip


@on_each_backend(strategies.cases, archs=strategies.FAMILIES, examples=[ALIKE])
def test_is_the_gradient_of_forward(backend, case):
    check_gradients_of_forward(backend, case)


@on_each_backend(strategies.cases, longest=70)
def test_results_are_arrays_like_the_inputs(backend, case):
    q, k, v, dout = (backend.place(x) for x in inputs(case))
    with backend.running(case):
        out, lse = cuflash.forward(q, k, v, **case.call(), return_lse=True)
        grads = cuflash.backward(dout, q, k, v, out, lse, **case.call())
    for grad, like in zip(grads, (q, k, v), strict=True):
        assert type(grad) is backend.array_type
        assert grad.dtype == like.dtype and grad.shape == like.shape


@on_each_backend(strategies.cases, longest=70, archs=strategies.FAMILIES)
def test_keys_that_nobody_sees_get_zero(backend, case):
    q, k, v, dout = inputs(case)
    _, dk, dv = calls.gradients(backend, case, q, k, v, dout)
    seen = visible(case.seqlen_q, case.seqlen_k, case.causal).any(axis=0)
    assert_all(dk[:, ~seen], 0, "dk[:, ~seen]", case)
    assert_all(dv[:, ~seen], 0, "dv[:, ~seen]", case)


@on_each_backend(
    strategies.cases,
    dtypes=("bfloat16", "float32", "float64"),  # float16 has subnormals
    longest=70,
    archs=strategies.FAMILIES,
)
def test_twice_dout_gives_twice_the_gradients(backend, case):
    """Scaling by a power of two is exact, so every result doubles exactly."""
    case = replace(case, deterministic=True)
    q, k, v, dout = inputs(case)
    once = calls.gradients(backend, case, q, k, v, dout)
    twice = calls.gradients(backend, case, q, k, v, dout * 2)
    for name, a, b in zip(("dq", "dk", "dv"), once, twice, strict=True):
        assert_bitwise(normal(b), normal(a * a.dtype.type(2)), name)


@on_each_backend(strategies.cases, longest=70)
def test_ranks_agree(backend, case):
    case = replace(case, deterministic=True)
    arrays = [x[:1, :, :1] for x in inputs(case)]
    four = calls.gradients(backend, case, *arrays)
    three = calls.gradients(backend, case, *(x[0] for x in arrays))
    two = calls.gradients(backend, case, *(x[0, :, 0] for x in arrays))
    for name, a, b, c in zip("qkv", four, three, two, strict=True):
        assert_bitwise(b, a[0], f"3-D d{name}")
        assert_bitwise(c, a[0, :, 0], f"2-D d{name}")


def normal(array):
    """Replace subnormal or flushed numbers by +0: doubling them may round."""
    size = np.abs(np.asarray(array, np.float64))
    return np.where(size < 2.0**-120, array.dtype.type(0), array)
