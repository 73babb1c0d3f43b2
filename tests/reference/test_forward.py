"""Four schedules of the forward pass, all equal to the materialised one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import forward
from cuflash.reference.attention import attention
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_same_nonfinite,
)
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    bounds,
    forward_results,
)
from helpers.reference_dense import dense_products, dense_scores
from reference_strategies import reference_cases


def assert_all_equal_attention(case, q, k, v, dout):
    expected, expected_lse = attention(q, k, v, **case.meaning())
    finite = (np.nan_to_num(x, posinf=0, neginf=0) for x in (q, k, v, dout))
    bound = bounds(case, *finite)
    for name, (out, lse) in forward_results(case, q, k, v):
        assert_close(out, expected, bound.out, name)
        assert_close(lse, expected_lse, bound.lse, name)


@given(reference_cases())
def test_every_schedule_equals_attention(case):
    assert_all_equal_attention(case, *case.arrays())


@given(reference_cases(smallest=1), st.data())
def test_nan_at_the_same_positions(case, data):
    arrays = case.arrays()
    for x in arrays[:3]:
        at = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape)
        x[at] = data.draw(st.sampled_from([0.0, np.nan]))
    assert_all_equal_attention(case, *arrays)


@given(reference_cases(smallest=1), st.data())
def test_nonfinite_at_the_same_positions(case, data):
    arrays = case.arrays()
    for x in arrays[:3]:
        at = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape)
        x[at] = data.draw(st.sampled_from([np.inf, -np.inf, 1.0]))
    expected = attention(*arrays[:3], **case.meaning())
    for name, results in forward_results(case, *arrays[:3]):
        for got, expect in zip(results, expected, strict=True):
            assert_same_nonfinite(got, expect, name, case, kinds=False)


@given(reference_cases(), st.integers(1, 9))
def test_any_number_of_splits(case, num_splits):
    q, k, v, dout = case.arrays()
    expected, _ = attention(q, k, v, **case.meaning())
    out, _ = forward.split_keys(
        q, k, v, num_splits=num_splits, **case.meaning(), **case.blocks()
    )
    assert_close(out, expected, bounds(case, q, k, v, dout).out)


@given(reference_cases())
def test_without_softmax_is_a_product_in_any_order(case):
    # [003], Algorithm 2. Integers below 10: every sum is exact.
    q, k, v, _ = (np.round(3 * x).clip(-9, 9) for x in case.arrays())
    blocks = {**case.blocks(), "heads_first": True}
    out = forward.without_softmax(q, k, v, scale=1.0, **blocks)
    k_t = np.swapaxes(k, -1, -2)
    assert_arrays_equal(out, q @ k_t @ v, "out")
    assert_arrays_equal(out, q @ (k_t @ v), "out")


def test_without_softmax_of_the_worked_example():
    # Row 0 of [002]'s S is 1 0 2 0, and V counts from 1 to 16.
    q, k = np.array([[1, 0, 1, 0]]), np.eye(4)[[0, 1, 0, 1]]
    k[2, 2] = k[3, 3] = 1
    v = np.arange(1, 17).reshape(4, 4)
    out = forward.without_softmax(q, k, v, scale=1, block_k=2)
    assert_arrays_equal(out, [[19, 22, 25, 28]], "out")


@pytest.mark.parametrize("size", [1e3, 1e100, 1e150])
def test_extreme_logits_pick_the_winner_exactly(size):
    # Keys are unit vectors, so that S is exact; row i wants key i.
    case = ReferenceCase(scale=1.0, block_q=2, block_k=3)
    q, v = size * np.eye(7), np.arange(7.0)[:, None]
    for name, (out, lse) in forward_results(case, q, size * np.eye(7), v):
        assert_arrays_equal(out, v, "out", name)
        assert_arrays_equal(lse, np.full(7, size * size), "lse", name)


def test_later_tile_with_a_far_larger_score_replaces_all():
    case = ReferenceCase(scale=1.0, block_k=1)
    q, v = np.ones((1, 1)), np.array([[1.0], [2.0], [4.0]])
    k = np.array([[-1e300], [1e300], [1e300]])
    for name, (out, lse) in forward_results(case, q, k, v):
        assert (out.item(), lse.item()) == (3, 1e300), name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_invisible_tokens_do_not_spread(bad):
    case = ReferenceCase(seqlen_q=7, seqlen_k=7, causal=True)
    q, k, v, dout = case.arrays()
    expected, _ = attention(q, k, v, causal=True)
    bound = bounds(case, q, k, v, dout).out
    k[4:], v[4:] = bad, bad
    for name, (out, _) in forward_results(case, q, k, v):
        assert_close(out[:4], expected[:4], bound, name)
        assert_all(out[4:], np.nan, "out[4:]", name)


def test_inf_in_v_beside_a_score_of_minus_infinity():
    # Weight 0 times inf is NaN, whichever tile it stands in.
    case = ReferenceCase(scale=1.0, block_k=1)
    q, k = np.ones((1, 1)), np.array([[-np.inf], [0.0]])
    v = np.array([[np.inf, 1.0], [2.0, 3.0]])
    for name, (out, _) in forward_results(case, q, k, v):
        assert_arrays_equal(out, [[np.nan, 3]], "out", name)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_row_of_minus_infinity_has_weights_of_zero(place):
    # Its values are read all the same: 0 * inf is NaN.
    case = ReferenceCase(scale=1.0, block_k=1)
    q, k, v = np.ones((2, 1)), np.full((3, 1), -np.inf), np.ones((3, 2))
    v[place, 1] = np.inf
    for name, (out, lse) in forward_results(case, q, k, v):
        assert_arrays_equal(out, [[0, np.nan]] * 2, "out", name)
        assert_arrays_equal(lse, [-np.inf, -np.inf], "lse", name)


def test_inputs_are_left_as_they_are():
    case = ReferenceCase(causal=True)
    q, k, v, _ = case.arrays()
    before = [x.copy() for x in (q, k, v)]
    list(forward_results(case, q, k, v))
    for x, old in zip((q, k, v), before, strict=True):
        assert_arrays_equal(x, old, "x")


@given(reference_cases())
def test_the_largest_score(case):
    q, k, _, _ = case.arrays()
    got = forward.max_score(q, k, **case.meaning(), **case.blocks())
    want = dense_scores(case, q, k).max(axis=-1, initial=-np.inf)
    sizes = abs(dense_products(case, abs(q), abs(k)))
    # Twice head_dim roundings of a product, and ten of what options add.
    most = sizes.max(initial=0) + abs(want[np.isfinite(want)]).max(initial=0)
    rounding = (2 * case.head_dim + 10) * EPS * most
    assert_allclose(got, want, "max_score", atol=rounding, case=case)


def test_a_score_of_inf_counts_more_than_one_of_nan():
    q, k = np.ones((1, 1)), np.array([[1.0], [np.nan], [np.inf]])
    for keys, want in ((k, np.inf), (k[:2], np.nan), (k[:1], 1.0)):
        got = forward.max_score(q, keys, scale=1.0, block_k=1)
        assert_arrays_equal(got, [want], "max_score")
