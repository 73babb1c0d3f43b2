"""Mutants that no other test caught (scripts/mutate.py)."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash import plan
from helpers import calls, expected
from helpers.backends import EMULATED, on_backends, on_each_emulated_kind
from helpers.compare import (
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, Emulation, inputs
from helpers.dtypes import DTYPES, lse_dtype

emulated = pytest.mark.parametrize("backend", [EMULATED])


def with_l2_of(nbytes):
    """Have plans made for a GPU with so much second-level cache."""
    known = plan.device_of_arch

    def device_of_arch(arch):
        return replace(known(arch), l2_bytes=nbytes)

    return mock.patch.object(plan, "device_of_arch", device_of_arch)


@emulated
def test_heads_in_sections(backend):
    """Two heads at a time of five (common/scheduler.cuh), three tiles each."""
    case = Case(
        "float16", 1, 70, 70, 5, 5, head_dim=32, head_dim_v=32,
        causal=True, block_q=32, block_k=32,
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    forward, backward = 70 * 64 * 2, 70 * 32 * 8  # what a head's blocks share
    with with_l2_of(2 * 2 * forward):
        out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    with with_l2_of(2 * 2 * backward):
        grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty_first", [False, True])
def test_merging_with_a_state_without_keys(backend, dtype, empty_first):
    """Its out may be anything."""
    case = Case(dtype, 1, 8, num_heads_q=2)
    out = inputs(case)[0]
    lse = np.linspace(-3, 3, 16, dtype=lse_dtype(out.dtype)).reshape(1, 2, 8)
    empty = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    first, second = (empty, (out, lse)) if empty_first else ((out, lse), empty)
    got_out, got_lse = calls.merge_states(backend, case, *first, *second)
    assert_bitwise(got_out, out, "out")
    assert_bitwise(got_lse, lse, "lse")


@on_each_emulated_kind
def test_nonfinite_numbers_with_several_heads(backend, dtype, arch):
    """Of key heads and of query heads that share one."""
    spoiled = (
        ("q", (1, 30, 4, 2), "nan"),
        ("k", (0, 45, 1, 5), "inf"),
        ("v", (1, 50, 2, 3), "nan"),
        ("dout", (0, 20, 3, 1), "-inf"),
    )
    case = Case(
        dtype, 2, 40, 60, 6, 3, causal=True, scale=-0.3, spoiled=spoiled,
        on=Emulation(arch),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case, kinds=False)


@on_each_emulated_kind
def test_huge_scores_that_scale_rounds(backend, dtype, arch):
    """Forward and backward have to round scale * S alike.

    In the other tests of huge scores scale is 1, and nothing is rounded.
    """
    case = Case(
        dtype, 1, 20, 40, head_dim=40, scale=0.7, values="one_huge",
        on=Emulation(arch),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    exact = {**case.meaning(), "exact_scores": True}
    want = expected.forward(q, k, v, **exact)
    assert_forward_matches((out, lse), want, case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **exact)
    assert_gradients_match(grads, want, case)


@emulated
@pytest.mark.parametrize("values", [Case.values, "one_huge"])
def test_an_infinity_of_dout_meets_weights_of_0(backend, values):
    """Of dropped pairs; beside a huge score. NaN in dV, as 0 * inf is.

    In dK, whose terms are infinities and NaN, a sum may be either.
    """
    case = Case(
        "bfloat16", 1, 30, 40, causal=True, dropout=0.5, values=values,
        spoiled=(("dout", (0, 20, 0, 3), "inf"),),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    *_, dv = calls.backward(backend, case, dout, q, k, v, out, lse)
    exact = {**case.meaning(), "exact_scores": values == "one_huge"}
    *_, want = expected.backward(dout, q, k, v, **exact)
    assert_matches(dv, want, "dv", case)


@on_each_emulated_kind
def test_a_mask_of_each_head(backend, dtype, arch):
    case = Case(
        dtype, 1, 30, 40, 2, 2, arrays_of=("mask",), seed=2,
        on=Emulation(arch),
    )  # fmt: skip
    assert case.options()["mask"].shape[1:] == (2, 30, 40)
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_each_emulated_kind
def test_out_alone(backend, dtype, arch):
    """Nobody asks for lse."""
    case = Case(dtype, on=Emulation(arch))
    q, k, v, _ = inputs(case)
    want, _ = calls.forward(backend, case, q, k, v)
    with backend.running(case):
        got = cuflash.forward(q, k, v)
    assert_bitwise(got, want, "out")
