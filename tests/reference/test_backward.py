"""Four schedules of the backward pass, all equal to the materialised one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import backward
from cuflash.reference.attention import (
    attention,
    attention_vjp,
    gradient_steps,
)
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_finite,
    assert_same_nonfinite,
)
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    backward_results,
    bounds,
)
from reference_strategies import reference_cases

NAMES = ("dq", "dk", "dv")


def assert_gradients(got, expected, bound, name=""):
    for which, a, b in zip(NAMES, got, expected, strict=True):
        assert_close(a, b, getattr(bound, which), f"{name} {which}")


def assert_all_equal_vjp(case, q, k, v, dout):
    out, lse = attention(q, k, v, **case.meaning())
    expected = attention_vjp(dout, q, k, v, **case.meaning())
    bound = bounds(case, *(np.nan_to_num(x) for x in (q, k, v, dout)))
    operands = (dout, q, k, v, out, lse)
    for name, gradients in backward_results(case, *operands):
        assert_gradients(gradients, expected, bound, name)


@given(reference_cases())
def test_every_schedule_equals_the_vjp(case):
    assert_all_equal_vjp(case, *case.arrays())


@given(reference_cases(smallest=1), st.data())
def test_nan_at_the_same_positions(case, data):
    arrays = case.arrays()
    for x in arrays:
        at = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape)
        x[at] = data.draw(st.sampled_from([0.0, np.nan]))
    assert_all_equal_vjp(case, *arrays)


@given(reference_cases(smallest=1), st.data())
def test_nonfinite_at_the_same_positions(case, data):
    q, k, v, dout = arrays = case.arrays()
    for x in arrays:
        at = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape)
        x[at] = data.draw(st.sampled_from([np.inf, -np.inf, 1.0]))
    expected = attention_vjp(dout, q, k, v, **case.meaning())
    operands = dout, q, k, v, *attention(q, k, v, **case.meaning())
    for name, gradients in backward_results(case, *operands):
        for got, expect in zip(gradients, expected, strict=True):
            assert_same_nonfinite(got, expect, name, case, kinds=False)


@given(reference_cases())
def test_delta_is_the_row_sum_of_p_times_dp(case):
    q, k, v, dout = case.arrays()
    out, _ = attention(q, k, v, **case.meaning())
    steps = gradient_steps(dout, q, k, v, **case.meaning())
    bound = bounds(case, q, k, v, dout).delta
    assert_close(backward.delta(dout, out), steps.delta, bound)


@given(reference_cases(smallest=2), st.data())
def test_p_comes_from_lse_alone(case, data):
    """Gradients of parts of the keys, with the whole's lse, add up."""
    q, k, v, dout = case.arrays()
    cut = data.draw(st.integers(1, case.seqlen_k - 1))
    scale = {"scale": case.scale, "heads_first": True}
    out, lse = attention(q, k, v, **scale)
    blocks = case.blocks()
    first, second = (
        backward.key_outer(dout, q, kk, vv, out, lse, **scale, **blocks)
        for kk, vv in zip(
            np.split(k, [cut], -2), np.split(v, [cut], -2), strict=True
        )
    )
    got = (
        first[0] + second[0],
        np.concatenate([first[1], second[1]], axis=-2),
        np.concatenate([first[2], second[2]], axis=-2),
    )
    expected = attention_vjp(dout, q, k, v, **scale)
    assert_gradients(got, expected, bounds(case, q, k, v, dout))


def test_row_that_sees_no_key_gives_to_no_gradient():
    case = ReferenceCase(seqlen_q=5, seqlen_k=3, causal=True)
    q, k, v, dout = case.arrays()
    bound = bounds(case, q, k, v, dout)
    expected = attention_vjp(dout, q, k, v, causal=True)
    q[:2], dout[:2] = np.nan, np.inf
    operands = (dout, q, k, v, *attention(q, k, v, causal=True))
    for name, gradients in backward_results(case, *operands):
        assert_gradients(gradients, expected, bound, name)
        assert_arrays_equal(gradients[0][:2], 0, name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_invisible_tokens_do_not_spread(bad):
    # Query i sees keys 0 to i: 0 to 3 don't see 4 to 6.
    case = ReferenceCase(causal=True)
    q, k, v, dout = case.arrays()
    bound = bounds(case, q, k, v, dout)
    expected = attention_vjp(dout, q, k, v, causal=True)
    q[:4], dout[:4] = bad, bad
    operands = (dout, q, k, v, *attention(q, k, v, causal=True))
    for name, (dq, dk, dv) in backward_results(case, *operands):
        assert_close(dq[4:], expected[0][4:], bound.dq, name)
        assert_close(dk[4:], expected[1][4:], bound.dk, name)
        assert_close(dv[4:], expected[2][4:], bound.dv, name)


@pytest.mark.parametrize("size", [1e3, 1e100, 1e150])
def test_extreme_logits_send_all_gradient_to_the_winner(size):
    # Keys are unit vectors, so that S is exact; row i wants key i.
    case = ReferenceCase(scale=1.0, block_q=2, block_k=3)
    q, v = size * np.eye(7), np.arange(7.0)[:, None]
    dout = np.arange(7.0, 14.0)[:, None]
    operands = (dout, q, q, v, *attention(q, q, v, scale=1.0))
    for name, (dq, dk, dv) in backward_results(case, *operands):
        assert_arrays_equal(dv, dout, "dv", name)
        assert_arrays_equal(dq, np.zeros((7, 7)), "dq", name)
        assert_arrays_equal(dk, np.zeros((7, 7)), "dk", name)


def minus_infinity_and_zero():
    """Row 0 scores -inf everywhere, row 1 scores 1."""
    q, k = np.array([[-np.inf, 0], [0, 1]]), np.ones((3, 2))
    return q, k, np.ones((3, 1)), np.ones((2, 1))


def test_row_of_minus_infinity_is_in_every_sum_with_weight_zero():
    case = ReferenceCase(scale=1.0, block_q=1, block_k=1)
    q, k, v, dout = minus_infinity_and_zero()
    q[0, 1] = 1
    operands = (dout, q, k, v, *attention(q, k, v, scale=1.0))
    for name, (dq, dk, dv) in backward_results(case, *operands):
        assert_arrays_equal(dq[0], [0, 0], "dq[0]", name)
        assert_all(dk[:, 0], np.nan, "dk[:, 0]", name)  # 0 * -inf, from q
        assert_finite(dk[:, 1], "dk[:, 1]", name)
        # P of row 1, in EPS: log 2.2, lse 2.1, S - lse 1.1, exp 2.
        assert_allclose(dv, 1 / 3, name, rtol=8 * EPS, case=name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradient_of_a_row_of_minus_infinity_is_read(bad):
    case = ReferenceCase(scale=1.0, block_q=1, block_k=1)
    q, k, v, dout = minus_infinity_and_zero()
    dout[0] = bad
    operands = (dout, q, k, v, *attention(q, k, v, scale=1.0))
    for name, (dq, dk, dv) in backward_results(case, *operands):
        assert_all(dq[0], np.nan, "dq[0]", name)
        assert_finite(dq[1], "dq[1]", name)
        assert_all(dk, np.nan, "dk", name)
        assert_all(dv, np.nan, "dv", name)


def test_inputs_are_left_as_they_are():
    case = ReferenceCase(causal=True)
    q, k, v, dout = case.arrays()
    operands = [dout, q, k, v, *attention(q, k, v, causal=True)]
    before = [x.copy() for x in operands]
    list(backward_results(case, *operands))
    for x, old in zip(operands, before, strict=True):
        assert_arrays_equal(x, old, "x")
