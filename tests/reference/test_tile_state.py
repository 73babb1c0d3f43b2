"""The state of a subset of the keys, and merges in any order."""

import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import tile_state
from cuflash.reference.tile_state import TileState
from helpers.compare import assert_all, assert_allclose, assert_arrays_equal
from helpers.reference_cases import EPS

SEEDS = st.integers(0, 2**32 - 1)
ROWS, HEAD_DIM_V = 3, 2


def random_tile(keys, seed, size=5.0):
    rng = np.random.default_rng(seed)
    scores = size * rng.standard_normal((ROWS, keys))
    return scores, rng.standard_normal((keys, HEAD_DIM_V))


def assert_same_result(a, b, scores, values):
    """Compare what two bracketings of the same keys finalize to.

    Each of at most `keys` merges rounds an exponent (their sum is at most
    the range of scores), an exp, two products and a sum, in numerator and
    denominator; both states err.
    """
    keys = scores.shape[-1]
    spread = 2 * abs(scores).max(initial=0)
    rel = 2 * 2 * (spread + 6 * keys + 6) * EPS
    (out_a, lse_a), (out_b, lse_b) = a.finalize(), b.finalize()
    bound = rel * abs(values).max(initial=0)
    assert_allclose(out_a, out_b, "out_a", atol=bound)
    bound = rel + 2 * EPS * (spread + np.log(keys + 1))
    assert_allclose(lse_a, lse_b, "lse_a", atol=bound)


def assert_identical(a, b):
    for x, y in zip((a.m, a.l, a.acc), (b.m, b.l, b.acc), strict=True):
        assert_arrays_equal(x, y, "x")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), SEEDS)
def test_any_tree_over_any_split_is_attention(sizes, seed):
    rng = np.random.default_rng(seed)
    scores, values = random_tile(sum(sizes), seed)
    order = rng.permutation(sum(sizes))
    parts = np.split(order, np.cumsum(sizes)[:-1])
    forest = [TileState.of_tile(scores[:, j], values[j]) for j in parts]
    while len(forest) > 1:
        a = forest.pop(rng.integers(len(forest)))
        b = forest.pop(rng.integers(len(forest)))
        forest.append(a.merge(b))
    whole = TileState.of_tile(scores, values)
    assert_same_result(forest[0], whole, scores, values)


@given(st.integers(0, 12), SEEDS)
def test_elements_are_tiles_of_size_one(keys, seed):
    scores, values = random_tile(keys, seed)
    state = TileState.empty((ROWS,), HEAD_DIM_V)
    for j in range(keys):
        one = slice(j, j + 1)
        state = state.merge(TileState.of_tile(scores[:, one], values[one]))
    whole = TileState.of_tile(scores, values)
    assert_same_result(state, whole, scores, values)


@given(st.integers(0, 6), st.integers(0, 6), SEEDS)
def test_update_is_the_merge_with_the_tile(first, second, seed):
    scores, values = random_tile(first + second, seed)
    a = TileState.of_tile(scores[:, :first], values[:first])
    tile = scores[:, first:], values[first:]
    merged = a.merge(TileState.of_tile(*tile))
    assert_same_result(a.update(*tile), merged, scores, values)


@given(st.integers(0, 6), SEEDS)
def test_empty_is_the_identity(keys, seed):
    state = TileState.of_tile(*random_tile(keys, seed))
    empty = TileState.empty((ROWS,), HEAD_DIM_V)
    assert_identical(empty.merge(state), state)
    assert_identical(state.merge(empty), state)


@given(st.integers(0, 6), st.integers(0, 6), SEEDS)
def test_merge_commutes(keys_a, keys_b, seed):
    a = TileState.of_tile(*random_tile(keys_a, seed))
    b = TileState.of_tile(*random_tile(keys_b, seed + 1))
    assert_identical(a.merge(b), b.merge(a))


def test_scores_of_any_size_merge():
    values = np.array([[1.0], [2.0], [4.0]])
    scores = np.array([[1e300, -1e300, 1e300]])
    states = [
        TileState.of_tile(scores[:, j : j + 1], values[j : j + 1])
        for j in range(3)
    ]
    out, lse = tile_state.merge_tree(states).finalize()
    assert (out.item(), lse.item()) == (2.5, 1e300)


def test_no_key_finalizes_to_zero_and_minus_infinity():
    out, lse = TileState.empty((2,), 3).finalize()
    assert_arrays_equal(out, np.zeros((2, 3)), "out")
    assert_arrays_equal(lse, [-np.inf, -np.inf], "lse")


@pytest.mark.parametrize(("bad", "result"), [(1, 0), (np.inf, np.nan)])
def test_visible_scores_of_minus_infinity_have_no_weight(bad, result):
    # Their values are read all the same: 0 * inf is NaN.
    values = np.array([[1.0, 1.0], [1.0, bad]])
    state = TileState.of_tile(np.full((1, 2), -np.inf), values)
    out, lse = state.finalize()
    assert_arrays_equal(out, [[0, result]], "out")
    assert lse.item() == -np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_score_makes_its_row_nan_and_no_other(bad):
    a = TileState.of_tile(np.array([[bad], [0.0]]), np.ones((1, 1)))
    b = TileState.of_tile(np.array([[9.0], [0.0]]), np.ones((1, 1)))
    for state in (a.merge(b), b.merge(a), a):
        out, lse = state.finalize()
        assert_all(out[0], np.nan, "out[0]")
        assert_arrays_equal(lse[0], bad, "lse[0]")
        assert out[1] == 1


def test_invisible_value_is_not_read():
    visible = np.array([[True, False]])
    scores = np.where(visible, 2.0, -np.inf)
    values = np.array([[3.0], [np.nan]])
    out, lse = TileState.of_tile(scores, values, visible).finalize()
    assert (out.item(), lse.item()) == (3, 2)


@given(st.integers(1, 6), SEEDS)
def test_result_and_state_are_two_forms_of_one_thing(keys, seed):
    out, lse = TileState.of_tile(*random_tile(keys, seed)).finalize()
    again = TileState.of_result(out, lse).finalize()
    assert_arrays_equal(again[0], out, "again[0]")
    assert_arrays_equal(again[1], lse, "again[1]")


def test_empty_result_is_the_identity_whatever_its_out_holds():
    nothing = TileState.of_result(np.full((1, 1), np.nan), [-np.inf])
    other = TileState.of_result(np.full((1, 1), 7.0), [0.1])
    assert_identical(nothing.merge(other), other)
    assert_identical(other.merge(nothing), other)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), SEEDS)
def test_merge_tree_is_attention(sizes, seed):
    scores, values = random_tile(sum(sizes), seed)
    cuts = np.cumsum(sizes)[:-1]
    parts = zip(
        np.split(scores, cuts, axis=1), np.split(values, cuts), strict=True
    )
    state = tile_state.merge_tree([TileState.of_tile(*p) for p in parts])
    whole = TileState.of_tile(scores, values)
    assert_same_result(state, whole, scores, values)


@given(st.integers(1, 12), SEEDS)
def test_lse_is_scipys_logsumexp(keys, seed):
    scores, values = random_tile(keys, seed)
    _, lse = TileState.of_tile(scores, values).finalize()
    expected = scipy.special.logsumexp(scores, axis=-1)
    # Each side: keys additions, an exp, the exponents, a log, m + log(l).
    atol = 2 * (4 * abs(scores).max() + keys + np.log(keys) + 6) * EPS
    assert_allclose(lse, expected, "lse", atol=atol)


@given(st.integers(1, 12), SEEDS)
def test_probabilities_from_lse_are_the_softmax(keys, seed):
    scores, values = random_tile(keys, seed)
    _, lse = TileState.of_tile(scores, values).finalize()
    p = tile_state.probabilities_from_lse(scores, lse)
    # An error in lse (see above) or in S - lse is a relative error of P.
    rtol = 2 * (8 * abs(scores).max() + 2 * keys + np.log(keys) + 8) * EPS
    expected = scipy.special.softmax(scores, axis=-1)
    assert_allclose(p, expected, "p", rtol=rtol)


def test_row_without_keys_has_no_probabilities():
    scores = np.array([[1.0, np.nan], [-np.inf, 3.0]])
    lse = np.array([-np.inf, 3.0])
    p = tile_state.probabilities_from_lse(scores, lse)
    assert_arrays_equal(p, [[0, 0], [0, 1]], "p")
