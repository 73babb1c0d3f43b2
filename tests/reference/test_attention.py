"""Materialised attention and its gradient, against their definitions."""

import ml_dtypes
import numpy as np
import pytest
import scipy.special
from hypothesis import given

from cuflash.reference import masks
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
)
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    bounds,
)
from reference_strategies import reference_cases


def scaled_scores(case, q, k):
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    s = scale * np.einsum("...id,...jd->...ij", q, k)
    mask = masks.visible(case.seqlen_q, case.seqlen_k, causal=case.causal)
    return np.where(mask, s, -np.inf)


@given(reference_cases(smallest=1))
def test_out_is_scipys_softmax_times_v(case):
    q, k, v, dout = case.arrays()
    s = scaled_scores(case, q, k)
    empty = (s == -np.inf).all(axis=-1, keepdims=True)
    p = np.where(empty, 0, scipy.special.softmax(np.where(empty, 0, s), -1))
    out, _ = attention(q, k, v, **case.meaning())
    assert_close(out, p @ v, bounds(case, q, k, v, dout).out)


@given(reference_cases(smallest=1))
def test_lse_is_scipys_logsumexp(case):
    q, k, v, dout = case.arrays()
    expected = scipy.special.logsumexp(scaled_scores(case, q, k), axis=-1)
    _, lse = attention(q, k, v, **case.meaning())
    assert_close(lse, expected, bounds(case, q, k, v, dout).lse)


def test_default_scale_is_one_over_root_of_head_dim():
    q, k, v, _ = ReferenceCase(head_dim=16).arrays()
    assert_arrays_equal(
        attention(q, k, v)[0],
        attention(q, k, v, scale=0.25)[0],
        "attention(q, k, v)[0]",
    )


def test_last_query_sees_every_key_under_the_causal_mask():
    case = ReferenceCase(seqlen_q=3, seqlen_k=6)
    q, k, v, dout = case.arrays()
    causal, _ = attention(q, k, v, causal=True)
    full, _ = attention(q, k, v)
    bound = bounds(case, q, k, v, dout).out
    assert_close(causal[-1], full[-1], bound)
    assert abs(causal[0] - full[0]).max() > 1e6 * bound


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 3), (2, 0)])
def test_row_without_keys_is_zero(seqlen_q, seqlen_k):
    case = ReferenceCase(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    q, k, v, dout = case.arrays()
    out, lse = attention(q, k, v, causal=True)
    assert_arrays_equal(out[:2], 0, "out[:2]")
    assert_arrays_equal(lse[:2], -np.inf, "lse[:2]")
    dq, _, _ = attention_vjp(dout, q, k, v, causal=True)
    assert_arrays_equal(dq[:2], 0, "dq[:2]")


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 3), (3, 0), (0, 0)])
def test_empty_lengths(seqlen_q, seqlen_k):
    case = ReferenceCase((2,), seqlen_q, seqlen_k, 4, 5)
    q, k, v, dout = case.arrays()
    out, lse = attention(q, k, v, heads_first=True)
    assert (out.shape, lse.shape) == (dout.shape, q.shape[:-1])
    for gradient, x in zip(
        attention_vjp(dout, q, k, v, heads_first=True), (q, k, v), strict=True
    ):
        assert_arrays_equal(gradient, np.zeros(x.shape), "gradient")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, "f4"])
def test_low_precision_inputs_are_computed_in_float64(dtype):
    low = [x.astype(dtype) for x in ReferenceCase().arrays()]
    q, k, v, dout = (x.astype(np.float64) for x in low)
    assert_arrays_equal(
        attention(*low[:3])[0], attention(q, k, v)[0], "attention(*low[:3])[0]"
    )
    for a, b in zip(
        attention_vjp(low[3], *low[:3]),
        attention_vjp(dout, q, k, v),
        strict=True,
    ):
        assert_close(a, b, 0)


@given(reference_cases(smallest=1))
def test_leading_axes_are_independent(case):
    q, k, v, dout = case.arrays()
    at = (-1,) * len(case.lead)
    bound = bounds(case, q, k, v, dout)
    out, lse = attention(q, k, v, **case.meaning())
    one_out, one_lse = attention(q[at], k[at], v[at], **case.meaning())
    assert_close(out[at], one_out, bound.out)
    assert_close(lse[at], one_lse, bound.lse)


def directional_derivative(f, x, direction, h):
    return (f(x + h * direction) - f(x - h * direction)) / (2 * h)


@given(reference_cases(smallest=1))
@pytest.mark.parametrize("argument", [0, 1, 2], ids="qkv")
def test_gradient_is_the_finite_difference(argument, case):
    *operands, dout = case.arrays()
    direction = np.random.default_rng(1).standard_normal(
        operands[argument].shape
    )
    direction /= np.linalg.norm(direction)

    def loss(x):
        moved = [*operands]
        moved[argument] = x
        return (dout * attention(*moved, **case.meaning())[0]).sum()

    gradient = attention_vjp(dout, *operands, **case.meaning())[argument]
    x, h = operands[argument], 1e-3
    once = directional_derivative(loss, x, direction, h)
    twice = directional_derivative(loss, x, direction, 2 * h)
    # D(h) = f' + h^2 f'''/6 + O(h^4), so |D(2h) - D(h)| is three times its
    # error, which leaves two thirds of it for the higher orders. The loss
    # itself is rounded: bounds().out for each of its terms.
    out_error = bounds(case, *operands, dout).out
    rounding = (out_error + dout.size * EPS) * abs(dout).sum() * 10 / h
    atol = abs(twice - once) + rounding
    got = (gradient * direction).sum()
    assert_allclose(got, once, "got", atol=atol)


def causal_square():
    """Three queries on three keys: query i sees keys 0 to i."""
    return ReferenceCase(seqlen_q=3, seqlen_k=3, causal=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_invisible_keys_and_values_do_not_spread(bad):
    q, k, v, dout = causal_square().arrays()
    out, lse = attention(q, k, v, causal=True)
    dq, _, _ = attention_vjp(dout, q, k, v, causal=True)
    k[2], v[2] = bad, bad
    got, got_lse = attention(q, k, v, causal=True)
    got_dq, _, _ = attention_vjp(dout, q, k, v, causal=True)
    assert_arrays_equal(got[:2], out[:2], "got[:2]")
    assert_arrays_equal(got_lse[:2], lse[:2], "got_lse[:2]")
    assert_arrays_equal(got_dq[:2], dq[:2], "got_dq[:2]")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_query_spreads_only_to_keys_that_it_sees(bad):
    q, k, v, dout = causal_square().arrays()
    _, dk, dv = attention_vjp(dout, q, k, v, causal=True)
    q[0], dout[0] = bad, bad
    _, got_dk, got_dv = attention_vjp(dout, q, k, v, causal=True)
    assert_arrays_equal(got_dk[1:], dk[1:], "got_dk[1:]")
    assert_arrays_equal(got_dv[1:], dv[1:], "got_dv[1:]")


def test_nan_query_spreads_to_keys_that_it_sees():
    q, k, v, dout = causal_square().arrays()
    q[1] = np.nan
    _, dk, dv = attention_vjp(dout, q, k, v, causal=True)
    assert_arrays_equal(
        np.isnan(dk).all(axis=1), [1, 1, 0], "np.isnan(dk).all(axis=1)"
    )
    assert_arrays_equal(
        np.isnan(dv).all(axis=1), [1, 1, 0], "np.isnan(dv).all(axis=1)"
    )


def test_visible_nan_spreads_to_the_rows_that_read_it():
    q, k, v, dout = causal_square().arrays()
    v[1, 0] = np.nan
    out, lse = attention(q, k, v, causal=True)
    dq, _, dv = attention_vjp(dout, q, k, v, causal=True)
    assert_arrays_equal(
        np.isnan(out[:, 0]), [False, True, True], "np.isnan(out[:, 0])"
    )
    assert_finite(out[:, 1:], "out[:, 1:]")
    assert_finite(lse, "lse")
    assert_arrays_equal(
        np.isnan(dq).all(axis=1), [0, 1, 1], "np.isnan(dq).all(axis=1)"
    )
    assert_finite(dv, "dv")


def test_row_that_sees_no_key_gives_to_no_gradient():
    case = ReferenceCase(seqlen_q=5, seqlen_k=3)
    q, k, v, dout = case.arrays()
    bound = bounds(case, q, k, v, dout)
    expected = attention_vjp(dout[2:], q[2:], k, v, causal=True)
    q[:2], dout[:2] = np.nan, np.inf
    dq, dk, dv = attention_vjp(dout, q, k, v, causal=True)
    assert_arrays_equal(dq[:2], 0, "dq[:2]")
    assert_close(dq[2:], expected[0], bound.dq)
    assert_close(dk, expected[1], bound.dk)
    assert_close(dv, expected[2], bound.dv)


def test_score_of_minus_infinity_has_weight_zero():
    q, k, v = np.ones((1, 1)), np.array([[-np.inf], [2.0]]), np.eye(2)
    out, lse = attention(q, k, v)
    assert_arrays_equal(out, [[0, 1]], "out")
    assert_arrays_equal(lse, [2], "lse")


def test_row_of_minus_infinity_has_weights_of_zero():
    q, k = np.ones((1, 1)), np.full((2, 1), -np.inf)
    v, dout = np.ones((2, 1)), np.ones((1, 1))
    out, lse = attention(q, k, v)
    assert (out.item(), lse.item()) == (0, -np.inf)
    dq, dk, dv = attention_vjp(dout, q, k, v)
    assert_all(dq, np.nan, "dq")  # 0 * -inf, from k
    assert_arrays_equal([dk, dv], np.zeros((2, 2, 1)), "[dk, dv]")


def test_row_of_minus_infinity_reads_its_values():
    q, k = np.ones((1, 1)), np.full((2, 1), -np.inf)
    v, dout = np.array([[1.0, np.inf]] * 2), np.ones((1, 2))
    out, lse = attention(q, k, v)
    assert_arrays_equal(out, [[0, np.nan]], "out")
    assert lse.item() == -np.inf
    _, dk, dv = attention_vjp(dout, q, k, v)
    assert_all(dk, np.nan, "dk")
    assert_all(dv, 0, "dv")


def test_largest_logit_wins_exactly():
    q, k, v = np.array([[1e150]]), np.array([[-1e150], [1e150]]), np.eye(2)
    out, lse = attention(q, k, v)
    assert_arrays_equal(out, [[0, 1]], "out")
    assert lse.item() == (1e150 * 1e150)


@given(reference_cases())
def test_rows_of_ds_sum_to_zero(case):
    # Softmax does not change when a constant is added to a row of S.
    q, k, v, dout = case.arrays()
    steps = gradient_steps(dout, q, k, v, **case.meaning())
    assert_close(steps.ds.sum(-1), 0 * steps.delta, row_sum_bound(case))


def row_sum_bound(case):
    """Bound |sum_j P (dP - D)|: D (1 - sum P), and n roundings."""
    q, k, v, dout = case.arrays()
    g = (abs(dout) @ abs(v).swapaxes(-1, -2)).max(initial=0.0)
    return g * 8 * (case.seqlen_k + 4) * EPS
