"""Mutants that no other test caught (scripts/mutate.py)."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.plans import plan
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.backends import EMULATED, on_backends, on_each_emulated_kind
from helpers.checks import check_gradients
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_finite,
    assert_forward_matches,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, Emulation, inputs
from helpers.dtypes import DTYPES, lse_dtype
from helpers.options import MAKERS

emulated = pytest.mark.parametrize("backend", [EMULATED])


def with_l2_of(nbytes):
    """Make plans for a GPU with an L2 cache of that size."""
    known = plan.device_of_arch

    def device_of_arch(arch):
        return replace(known(arch), l2_bytes=nbytes)

    return mock.patch.object(plan, "device_of_arch", device_of_arch)


@emulated
def test_heads_in_sections(backend):
    """Five heads in sections of two (common/scheduler.cuh), 3 tiles each."""
    case = Case(
        "bfloat16", 1, 70, 70, 5, 5, head_dim=32, head_dim_v=32,
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


@emulated
def test_a_last_section_with_more_heads(backend):
    """Sections of 2 and 3 of five heads, 2 key tiles each, for 3 blocks."""
    case = Case(
        "bfloat16", 1, 200, 200, 5, 5, head_dim=64, head_dim_v=64,
        causal=True,
        on=Emulation("sm_90a", num_sms=3, l2_bytes=2 * 2 * 200 * 64 * 8),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
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
def test_nonfinite_numbers_with_several_heads(backend, dtype, on):
    """With several key heads, and query heads that share one.

    No key head has two of them: what one should not reach is finite. A lane
    of fma has two chunks of keys of 40 columns, one of 16.
    """
    spoiled = (
        ("q", (1, 30, 1, 2), "nan"),
        ("k", (0, 45, 1, 5), "inf"),
        ("v", (1, 50, 2, 3), "nan"),
        ("dout", (0, 20, 4, 1), "-inf"),
    )
    head_dim = 40 if dtype == "float32" else 16
    case = Case(
        dtype, 2, 40, 60, 6, 3, head_dim, head_dim, causal=True, scale=-0.3,
        spoiled=spoiled, on=on,
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case, kinds=False)


@on_each_emulated_kind
def test_huge_scores_that_scale_rounds(backend, dtype, on):
    """Forward and backward have to round scale * S alike.

    In the other tests of huge scores scale is 1, and nothing is rounded.
    """
    case = Case(
        dtype, 1, 20, 40, head_dim=32, scale=0.7, values="one_huge",
        on=on,
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
    is_huge = values == "one_huge"  # NumPy's lse would round it otherwise
    gradients = calls.both if is_huge else calls.gradients
    *_, dv = gradients(backend, case, q, k, v, dout)
    exact = {**case.meaning(), "exact_scores": is_huge}
    *_, want = expected.backward(dout, q, k, v, **exact)
    assert_matches(dv, want, "dv", case)


@on_each_emulated_kind
def test_a_mask_of_each_head(backend, dtype, on):
    case = Case(
        dtype, 2, 30, 40, 2, 2, arrays_of=("mask",), seed=2,
        on=on, spoiled=(("v", (1, 39, 1, 5), "nan"),),
    )  # fmt: skip
    assert case.options()["mask"].shape[1:] == (2, 30, 40)
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_each_emulated_kind
def test_out_alone(backend, dtype, on):
    """Without lse."""
    case = Case(dtype, on=on)
    q, k, v, _ = inputs(case)
    want, _ = calls.forward(backend, case, q, k, v)
    with backend.running(case):
        got = cuflash.forward(q, k, v)
    assert_bitwise(got, want, "out")


@emulated
def test_rows_computed_again_without_lse(backend):
    """Rows whose out begins with NaN; no lse is returned."""
    case = Case(
        "bfloat16", 1, 20, 40, causal=True, on=Emulation("sm_90a"),
        spoiled=(("v", (0, 30), "nan"),),
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    want, _ = calls.forward(backend, case, q, k, v)
    with backend.running(case):
        got = cuflash.forward(q, k, v, causal=True)
    assert_bitwise(got, want, "out")


@on_each_emulated_kind
def test_a_value_near_the_largest_number(backend, dtype, on):
    """No weight may exceed 1, although a later score is slightly larger."""
    case = Case(dtype, 1, 4, 2, scale=1.0, on=on)
    q, k, v, _ = inputs(case)
    q[...], k[...], v[...] = 0, 0, 0
    q[..., 0], k[:, 1, :, 0] = 1, 0.75
    largest = {"float16": 6e4, "float64": 1.7e308}.get(dtype, 3e38)
    v[:, 1] = 0.6 * largest
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@emulated
def test_padding_of_a_bias_is_not_read(backend):
    """After a row's last bias, the same chunk contains NaN."""
    case = Case("bfloat16", 1, 70, 47, on=Emulation("sm_90a"))
    q, k, v, dout = inputs(case)
    padded = np.full((1, 1, 70, 48), np.nan, q.dtype)
    bias = padded[..., :47]
    bias[...] = dout[0, :, 0, :1]
    want = expected.forward(q, k, v, bias=bias)
    out, lse = calls.forward(backend, case, q, k, v, bias=bias)
    assert_forward_matches((out, lse), want, case)
    got = calls.backward(backend, case, dout, q, k, v, out, lse, bias=bias)
    want = expected.backward(dout, q, k, v, bias=bias)[:3]
    assert_gradients_match(got, want, case)


@emulated
def test_dq_in_parts_of_several_query_tiles(backend):
    """With 256 columns, dQ is two MMAs with separate waits."""
    case = Case(
        "bfloat16", 1, 130, 60, head_dim=256, head_dim_v=64,
        on=Emulation("sm_90a"),
    )  # fmt: skip
    check_gradients(backend, case)


@emulated
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        # Small scores with slopes of each batch and head.
        ({"softcap": 30.0}, "alibi_slopes_of_batches"),
        # Biases of 64 queries at a time, slopes of all.
        ({"arrays_of": ("bias",)}, "alibi_slopes"),
    ],
    ids=["capped_slopes", "biased_slopes"],
)
def test_gradients_with_slopes(backend, fields, name):
    """One is steep: in its head lse is up to -800, and it is 0."""
    case = Case(
        "bfloat16", 2, 120, 70, 2, 1, 64, 64, seed=4,
        on=Emulation("sm_90a"), **fields,
    )  # fmt: skip
    slopes = MAKERS[name](np.random.default_rng(4), case)
    slopes.flat[-1] = 16
    options = {**case.meaning(), "alibi_slopes": slopes}
    q, k, v, dout = inputs(case)
    states = cuflash.forward(q, k, v, **options, return_lse=True)
    got = calls.backward(
        backend, case, dout, q, k, v, *states,
        alibi_slopes=backend.place(slopes),
    )  # fmt: skip
    want = expected.backward(dout, q, k, v, **options)
    assert_gradients_match(got, want, case)


@emulated
def test_a_window_in_a_key_tile_of_more_than_128_keys(backend):
    """A lane's bits fill two words; the window begins in the first."""
    case = Case(
        "bfloat16", 1, 70, 170, head_dim=64, head_dim_v=64,
        window=(90, 60),
        on=Emulation(
            "sm_90a", num_sms=1, forward_tile=Tile(128, 176, 12, 1, 2)
        ),
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@emulated
def test_key_tiles_under_a_mask_in_any_order(backend):
    """Each is loaded once; no stage is overwritten while it is read."""
    case = Case(
        "bfloat16", 2, 170, 200, 2, 1, 64, 64, causal=True, softcap=3e4,
        arrays_of=("mask",), on=Emulation("sm_90a", num_sms=2),
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    want = expected.forward(q, k, v, **case.meaning())
    for seed in range(4):
        other = replace(case, on=replace(case.on, seed=seed, resident=2))
        got = calls.forward(backend, other, q, k, v)
        assert_forward_matches(got, want, other)


@emulated
@pytest.mark.parametrize("head_dim", [64, 256])
def test_gradients_of_far_negative_scores(backend, head_dim):
    """Scores and lse are exact, but lse * log2(e) would be rounded."""
    case = Case(
        "bfloat16", 1, 20, 1, scale=1.0, head_dim=head_dim,
        on=Emulation("sm_90a"),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    q[...], k[...] = 0, 0
    q[..., 0] = -(2.0**12) * np.linspace(1, 2, 20).reshape(1, 20, 1)
    k[..., 0] = 2.0**12
    got = calls.gradients(backend, case, q, k, v, dout)
    want = expected.backward(
        dout, q, k, v, **case.meaning(), exact_scores=True
    )
    assert_gradients_match(got, want, case)


@emulated
def test_an_infinity_of_dout_meets_a_weight_that_a_bias_makes_0(backend):
    """dV is NaN, because 0 * inf is; without the bias it would be inf.

    Of a key that the query does not see it is finite.
    """
    case = Case(
        "bfloat16", 1, 30, 30, causal=True,
        spoiled=(("dout", (0, 20, 0, 3), "inf"),),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    bias = np.zeros((1, 1, 30, 30), q.dtype)
    bias[..., 5:9] = -1000
    mask = np.ones((30, 30), bool)
    mask[20, 10] = False
    given = {"bias": bias, "mask": mask}
    *_, dv = calls.gradients(backend, case, q, k, v, dout, **given)
    _, _, want, *_ = expected.backward(dout, q, k, v, causal=True, **given)
    assert_all(dv[0, 5:9, 0, 3], np.nan, "dv[0, 5:9, 0, 3]", case)
    assert_finite(dv[0, 10], "dv[0, 10]", case)
    assert_matches(dv, want, "dv", case)
