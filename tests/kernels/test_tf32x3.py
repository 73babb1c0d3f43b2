"""precision="tf32x3": float32 on tensor cores, with float32's errors.

Bounds are those of float32: what two parts of 11 bits leave out of a product
is less than what float32 sums lose. What tensor cores truncate comes on top,
which some of the emulator's cases do too (tests/helpers/rounding.py).
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
import strategies
from cuflash import emulator
from helpers import calls, expected
from helpers.backends import CUPY, EMULATED, on_kernels
from helpers.checks import check_forward, check_gradients
from helpers.compare import (
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend

KERNELS = [EMULATED, CUPY]

# Sums that tensor cores truncate: of scores of one sign, lse is off by more
# than roundings at random come to; of positive numbers, dk and dv too.
TRUNCATED = [
    Case(seqlen_q=122, seqlen_k=15, num_heads_q=6, num_heads_kv=2,
         head_dim=256, head_dim_v=64, precision="tf32x3",
         layout="every_other_element", values="jump", seed=58774808,
         on=Emulation(seed=2042024791, resident=1, truncates=True),
         arrays_of=("bias", "segment_ids_k", "segment_ids_q")),
]  # fmt: skip
TRUNCATED_GRADIENTS = [
    Case(seqlen_q=508, seqlen_k=17, num_heads_q=2, num_heads_kv=2,
         head_dim=192, head_dim_v=192, scale=-0.1, deterministic=True,
         precision="tf32x3", layout="misaligned", values="aligned",
         seed=2641267422, on=Emulation("sm_86", 134787216, truncates=True)),
]  # fmt: skip
# Weights that are flushed to 0 before dropout would double them.
FLUSHED = [
    Case(softcap=200.0, dropout=0.5, seqlen_q=1, seqlen_k=191, num_heads_q=2,
         head_dim=127, head_dim_v=127, causal=True, precision="tf32x3",
         values="large_row", seed=1679129500, arrays_of=("bias",)),
]  # fmt: skip
OPTIONS = {"dtype": "float32", "precision": "tf32x3"}
# Rows of dq are not aligned: their columns are added one by one.
PADDED = {"head_dim": 39, "head_dim_v": 72}


@st.composite
def of_few_kernels(draw, backend):
    """Draw a case; together they need two kernels, or all that exist."""
    return of_two_kernels(backend, draw(st.booleans()), draw(
        strategies.cases(backend, longest=70, **OPTIONS)
    ))  # fmt: skip


@st.composite
def with_options(draw, backend):
    """Draw a case with options, with few kernels per set of options."""
    return of_two_kernels(backend, draw(st.booleans()), draw(
        strategies.optional_cases(backend, longest=70, **OPTIONS)
    ))  # fmt: skip


def of_two_kernels(backend, truncates, case):
    case = replace(case, on=replace(case.on, truncates=truncates))
    if backend.name == "cupy" or strategies.is_wide(backend, False):
        return case
    return replace(
        case, **PADDED, block_q=None, block_k=None,  # other dims allow others
        deterministic=False, scale=None,
        on=Emulation(
            seed=case.on.seed, resident=case.on.resident, truncates=truncates
        ),
    )  # fmt: skip


@on_each_backend(of_few_kernels, examples=TRUNCATED_GRADIENTS)
def test_is_attention_and_its_gradient(backend, case):
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, sums=case.sums(), **case.meaning())
    assert_forward_matches((out, lse), want, case)
    got = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, sums=case.sums(), **case.meaning())
    assert_gradients_match(got, want, case)


@on_each_backend(with_options, backends=KERNELS, examples=TRUNCATED + FLUSHED)
def test_options_are_those_of_others(backend, case):
    check_forward(backend, case)
    check_gradients(backend, case)


@pytest.mark.parametrize("backend", KERNELS)
def test_the_same_bits_again(backend):
    case = Case("float32", 1, 70, 90, 2, 1, **PADDED, deterministic=True,
                precision="tf32x3")  # fmt: skip
    other = replace(case, on=Emulation(seed=1, resident=3))
    first = calls.gradients(backend, case, *inputs(case))
    again = calls.gradients(backend, other, *inputs(case))
    for name, a, b in zip(("dq", "dk", "dv"), again, first, strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", KERNELS)
def test_forward_of_nan_and_inf(backend, name, value):
    """They reach the right elements; an infinity counts as NaN."""
    case = Case("float32", 1, 50, 50, **PADDED, causal=True,
                precision="tf32x3", spoiled=((name, (0, 20, 0, 3), value),)
                )  # fmt: skip
    arrays = inputs(case)[:3]
    got = calls.forward(backend, case, *arrays)
    nan = (np.where(np.isinf(x), np.float32(np.nan), x) for x in arrays)
    want = expected.forward(*nan, sums=case.sums(), **case.meaning())
    assert_forward_matches(got, want, case, kinds=False)


@on_kernels
def test_it_is_another_kernel(backend):
    """Its last bits differ from fma's."""
    case = Case("float32", seqlen_q=40, seqlen_k=50, **PADDED)
    q, k, v, _ = inputs(case)
    plain, _ = calls.forward(backend, case, q, k, v)
    parts, _ = calls.forward(
        backend, replace(case, precision="tf32x3"), q, k, v
    )
    assert 0 < np.abs(plain - parts).max() < 1e-5


@pytest.mark.parametrize("backend", [EMULATED])
def test_a_gpu_that_is_too_old(backend):
    case = Case("float32", precision="tf32x3")
    q, k, v, _ = inputs(case)
    with emulator.active(arch="sm_75"):
        with pytest.raises(cuflash.UnsupportedError, match="leave it out"):
            cuflash.forward(q, k, v, precision="tf32x3")
