"""Softmax in three passes and in two, its recurrence and its gradient."""

import numpy as np
import pytest
import scipy.special
from hypothesis import given

from cuflash.reference import softmax
from helpers.compare import assert_all, assert_allclose, assert_arrays_equal
from helpers.reference_cases import EPS
from reference_strategies import logits

BOTH = pytest.mark.parametrize(
    "function", [softmax.safe_softmax, softmax.online_softmax]
)


def draw_logits(rows, keys, exponent, seed):
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (rows, keys)) * 10.0**exponent


def assert_equal_to_scipy(function, scores):
    """Compare; ours may be off by what its rescalings round.

    The exponents that multiply a weight add up to at most 745, where exp
    underflows, each with a relative error of 2 EPS; per key there is an
    exp (2 EPS), a product and a sum, in ours and (less) in scipy's.
    """
    keys = scores.shape[-1]
    rtol = (2 * 745 + 2 * (4 * keys + 8)) * EPS
    # Under the normal range one rounding of ours and one of scipy's.
    atol = 2 * np.finfo(float).smallest_subnormal
    with np.errstate(over="ignore"):
        expected = scipy.special.softmax(scores, axis=-1)
    assert_allclose(
        function(scores), expected, "function(scores)", rtol=rtol, atol=atol
    )


@BOTH
@given(drawn=logits())
def test_equal_to_scipy(function, drawn):
    assert_equal_to_scipy(function, draw_logits(*drawn))


@BOTH
def test_equal_to_scipy_at_the_largest_logits(function):
    scores = np.array([[1e300, -1e300, 1e300, 0.0], [1e300, 0, 1, -1e300]])
    assert_equal_to_scipy(function, scores)
    assert_arrays_equal(
        function(scores)[0], [0.5, 0, 0.5, 0], "function(scores)[0]"
    )


@given(drawn=logits())
def test_recurrence_holds_after_every_element(drawn):
    scores = draw_logits(*drawn)
    states = list(softmax.online_states(scores))
    assert len(states) == scores.shape[-1] + 1
    for k, (m, s) in enumerate(states[1:], start=1):
        seen = scores[:, :k]
        assert_arrays_equal(m, seen.max(axis=-1), "m")
        expected = np.exp(seen - m[:, None]).sum(axis=-1)
        # As in assert_equal_to_scipy, without the division.
        rtol = (2 * 745 + 2 * (4 * k + 8)) * EPS
        assert_allclose(s, expected, "s", rtol=rtol)


def test_recurrence_by_hand():
    # Milakov and Gimelshein: x = 1, 3, 2.
    states = list(softmax.online_states(np.array([1.0, 3.0, 2.0])))
    assert [float(m) for m, _ in states] == [-np.inf, 1, 3, 3]
    sums = [0, 1, np.exp(-2) + 1, np.exp(-2) + 1 + np.exp(-1)]
    # Three additions of numbers below 2.
    assert_allclose(
        [s for _, s in states], sums, "[s for _, s in states]", atol=6 * EPS
    )


def test_row_max_leaves_nan_aside():
    scores = np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, -np.inf]])
    assert_arrays_equal(
        softmax.row_max(scores), [3, -np.inf], "softmax.row_max(scores)"
    )


@BOTH
def test_row_of_minus_infinity_has_no_weights(function):
    scores = np.array([[-np.inf, -np.inf], [-np.inf, 5.0]])
    assert_arrays_equal(function(scores), [[0, 0], [0, 1]], "function(scores)")


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_make_their_own_row_nan(function, bad):
    p = function(np.array([[1.0, bad, 2.0], [1.0, 1.0, -np.inf]]))
    assert np.isnan(p[0]).any()
    assert_arrays_equal(p[1], [0.5, 0.5, 0], "p[1]")


def test_nan_spreads_to_its_whole_row():
    p = softmax.safe_softmax(np.array([[1.0, np.nan, 2.0]]))
    assert_all(p, np.nan, "p")


@BOTH
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_empty_shapes(function, shape):
    assert function(np.zeros(shape)).shape == shape


@given(drawn=logits())
def test_vjp_is_the_jacobian_product(drawn):
    rows, keys, _, seed = drawn
    rng = np.random.default_rng(seed)
    p = softmax.safe_softmax(rng.standard_normal(keys))
    dp = rng.standard_normal(keys)
    jacobian = np.diag(p) - np.outer(p, p)
    # Each side sums at most keys + 2 terms below max|dp| P.
    atol = 2 * (keys + 4) * EPS * 2 * abs(dp).max()
    got = softmax.softmax_vjp(dp, p)
    assert_allclose(got, jacobian @ dp, "got", atol=atol)


def test_vjp_leaves_invisible_pairs_out():
    p, visible = np.array([0.25, 0.75, 0.0]), np.array([True, True, False])
    ds = softmax.softmax_vjp(np.array([1.0, 5.0, np.nan]), p, visible)
    # D = 0.25 + 3.75 = 4; all numbers are exact in binary.
    assert_arrays_equal(ds, [-0.75, 0.75, 0], "ds")
