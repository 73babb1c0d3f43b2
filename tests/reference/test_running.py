"""Welford's running variance: the same pattern on another problem."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.running import Moments, welford
from helpers.reference_cases import EPS, assert_close

LARGEST = 100.0

values = st.lists(
    st.floats(-LARGEST, LARGEST, allow_subnormal=False), min_size=1
)
cuts = st.lists(st.integers(0, 50), max_size=4)


def bounds(n, largest=LARGEST):
    """Return how far off mean and M2 of n values up to `largest`, X, may be.

    A merge weighs the errors of two means by n_a / n and n_b / n, so they
    do not add up; its own roundings come to 8 EPS X. After at most n of
    them a mean is off by 8 n EPS X. M2 is a sum of at most n terms, each a
    square (or product) of differences below 2 X, with n_a n_b / n <= n / 4:
    in all below n X^2 n. The differences are off by 2 * 8 n EPS X, their
    squares by 4 X times that, and 4 + n roundings come to as many EPS.
    """
    mean = 8 * n * EPS * largest
    square = n / 4 * (8 * largest * mean + (4 + n) * EPS * 4 * largest**2)
    return mean, n * square


def parts_of(x, at):
    """Cut x at given indices, some of them repeated."""
    return np.split(x, sorted(min(c, len(x)) for c in at))


@given(values)
def test_welford_is_numpys_mean_and_variance(x):
    state = welford(x)
    mean, square = bounds(len(x))
    assert state.n == len(x)
    assert_close(state.mean, np.mean(x), mean)
    assert_close(state.variance(), np.var(x), square / len(x))


@given(values, cuts)
def test_any_split_merges_to_the_whole(x, at):
    whole = welford(x)
    state = Moments.empty()
    for part in parts_of(np.array(x), at):
        state = state.merge(welford(part))
    mean, square = bounds(len(x))
    assert state.n == len(x)
    assert_close(state.mean, whole.mean, 2 * mean)
    assert_close(state.m2, whole.m2, 2 * square)


@given(values, cuts)
def test_merge_may_be_bracketed_from_the_right(x, at):
    state = Moments.empty()
    for part in reversed(parts_of(np.array(x), at)):
        state = welford(part).merge(state)
    assert_close(state.m2 / len(x), np.var(x), bounds(len(x))[1] / len(x))


@given(values)
def test_empty_is_the_identity_of_merge(x):
    state, empty = welford(x), Moments.empty()
    for merged in (state.merge(empty), empty.merge(state)):
        assert merged == state
    assert empty.merge(empty) == empty


def test_rows_are_independent():
    x = np.random.default_rng(0).standard_normal((2, 3, 8))
    state = welford(x)
    assert state.mean.shape == (2, 3)
    assert_close(state.m2[1, 2], welford(x[1, 2]).m2, 0)


def test_ddof_one_is_the_documents_estimate():
    assert welford([1, 2, 3, 4]).variance(ddof=1) == pytest.approx(5 / 3)


def test_far_from_zero_it_keeps_what_the_sum_of_squares_loses():
    # Around 2^30 the integers' squares need 60 bits, float64 has 53.
    x = 2.0**30 + np.array([0, 1, 2, 3])
    assert welford(x).variance() == 1.25
    assert np.mean(x**2) - np.mean(x) ** 2 != 1.25


@pytest.mark.parametrize("n, ddof", [(0, 0), (1, 1)])
def test_too_few_values_have_no_variance(n, ddof):
    with pytest.raises(ValueError, match=f"more than {ddof} values, got {n}"):
        welford(np.ones(n)).variance(ddof)
