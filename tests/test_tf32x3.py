"""precision="tf32x3": float32 by tensor cores, with float32's errors.

Bounds are those of float32, unchanged: what two parts of 11 bits leave out
of a product is less than what float32 sums lose.
"""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from cuflash import emulator
from helpers import calls, expected
from helpers.backends import EMULATED, CupyBackend, on_kernels
from helpers.compare import (
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import Case, inputs
from helpers.drawn import on_each_backend

KERNELS = [EMULATED, pytest.param(CupyBackend(), id="cupy",
                                  marks=pytest.mark.gpu)]  # fmt: skip
OPTIONS = {"dtype": "float32", "precision": "tf32x3"}


@on_each_backend(strategies.cases, wide=True, **OPTIONS)
def test_forward_is_attention(backend, case):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_each_backend(strategies.cases, wide=True, **OPTIONS)
def test_backward_is_its_gradient(backend, case):
    *arrays, dout = inputs(case)
    got = calls.both(backend, case, *arrays, dout)
    want = expected.backward(dout, *arrays, **case.meaning())
    assert_gradients_match(got, want, case)


@on_each_backend(strategies.cases, backends=KERNELS, longest=100, **OPTIONS)
def test_the_same_bits_again(backend, case):
    case = replace(case, deterministic=True)
    arrays = inputs(case)
    other = replace(case.on, seed=case.on.seed + 1, resident=3)
    first = calls.both(backend, case, *arrays)
    again = calls.both(backend, replace(case, on=other), *arrays)
    for name, a, b in zip(("dq", "dk", "dv"), again, first, strict=True):
        assert_bitwise(a, b, name)


@on_each_backend(
    strategies.spoiled, backends=KERNELS, names=("q", "k", "v"), **OPTIONS
)
def test_forward_of_nan_and_inf(backend, case):
    """They stay where they belong; an infinity counts as NaN."""
    arrays = inputs(case)[:3]
    got = calls.forward(backend, case, *arrays)
    nan = (np.where(np.isinf(x), np.float32(np.nan), x) for x in arrays)
    want = expected.forward(*nan, **case.meaning())
    assert_forward_matches(got, want, case, kinds=False)


@on_kernels
def test_it_is_another_kernel(backend):
    """Its last bits differ from those of multiply-adds."""
    case = Case("float32", seqlen_q=40, seqlen_k=50, head_dim=64)
    q, k, v, _ = inputs(case)
    plain, _ = calls.forward(backend, case, q, k, v)
    parts, _ = calls.forward(
        backend, replace(case, precision="tf32x3"), q, k, v
    )
    assert 0 < np.abs(plain - parts).max() < 1e-5


@pytest.mark.parametrize("backend", [EMULATED])
def test_a_gpu_too_old_says_so(backend):
    case = Case("float32", precision="tf32x3")
    q, k, v, _ = inputs(case)
    with emulator.active(arch="sm_75"):
        with pytest.raises(cuflash.UnsupportedError, match="leave it out"):
            cuflash.forward(q, k, v, precision="tf32x3")
