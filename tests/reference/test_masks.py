"""Masks: dense, per tile, and sums over visible pairs."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import masks
from cuflash.reference.masks import Visibility
from cuflash.reference.options import Options, Tile, Tiles
from helpers.compare import assert_all, assert_arrays_equal
from reference_strategies import tile_questions


def test_causal_is_aligned_bottom_right():
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    mask = masks.visible(3, 5, causal=True)
    assert_arrays_equal(mask, np.array(expected, bool), "mask")


def test_first_queries_see_nothing_when_keys_are_fewer():
    mask = masks.visible(5, 3, causal=True)
    assert mask.sum(axis=1).tolist() == [0, 0, 1, 2, 3]


def test_without_a_mask_all_is_visible():
    assert_all(masks.visible(3, 2), True, "masks.visible(3, 2)")
    assert masks.visible(3, 2).shape == (3, 2)


def test_window_is_aligned_bottom_right():
    expected = [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    mask = masks.visible(3, 5, window=(1, 1))
    assert_arrays_equal(mask, np.array(expected, bool), "mask")


def test_causal_is_a_window_that_ends_at_the_query():
    causal = masks.visible(5, 7, causal=True, window=(2, 9))
    assert_arrays_equal(causal, masks.visible(5, 7, window=(2, 0)), "causal")
    assert causal.sum(axis=1).tolist() == [3] * 5


def test_pairs_of_one_segment():
    seen = masks.same_segment(np.array([0, 0, 7]), np.array([7, 0]))
    expected = [[0, 1], [0, 1], [1, 0]]
    assert_arrays_equal(seen, np.array(expected, bool), "seen")


@pytest.mark.parametrize("seqlen_q", range(5))
@pytest.mark.parametrize("seqlen_k", range(5))
def test_tile_answer_for_every_small_tile(seqlen_q, seqlen_k):
    dense = masks.visible(seqlen_q, seqlen_k, causal=True)
    for a, b in combinations(range(seqlen_q + 1), 2):
        for c, d in combinations(range(seqlen_k + 1), 2):
            seen = dense[a:b, c:d]
            answer = masks.tile_visibility(
                a, b, c, d, seqlen_q, seqlen_k, causal=True
            )
            assert (answer is Visibility.NONE) == (not seen.any())
            assert (answer is Visibility.ALL) == seen.all()


@given(tile_questions())
def test_tile_answer_agrees_with_the_dense_mask(question):
    q_start, q_stop, k_start, k_stop, *seqlens, causal, window = question
    dense = masks.visible(*seqlens, causal=causal, window=window)
    tile = dense[q_start:q_stop, k_start:k_stop]
    answer = masks.tile_visibility(*question)
    assert (answer is Visibility.NONE) == (not tile.any())
    assert (answer is Visibility.ALL) == (tile.all() and tile.size > 0)


@given(tile_questions())
def test_tile_of_the_mask_is_cut_from_the_dense_mask(question):
    q_start, q_stop, k_start, k_stop, *seqlens, causal, window = question
    dense = masks.visible(*seqlens, causal=causal, window=window)
    tile = masks.visible_tile(*question)
    assert_arrays_equal(tile, dense[q_start:q_stop, k_start:k_stop], "tile")


@given(tile_questions())
def test_only_a_full_tile_needs_no_mask(question):
    *tile, seqlen_q, seqlen_k, causal, window = question
    options = Options(causal=causal, window=window)
    pairs = Tiles(seqlen_q, seqlen_k, 1.0, options)
    needs_none = pairs.visible(Tile(*tile)) is None
    assert needs_none == (masks.tile_visibility(*question) is Visibility.ALL)


@given(st.integers(0, 40), st.integers(1, 50))
def test_tiles_cover_every_token_once(length, block):
    tokens = [t for tile in masks.tiles(length, block) for t in range(*tile)]
    assert tokens == list(range(length))
    assert all(b - a <= block for a, b in masks.tiles(length, block))


@pytest.mark.parametrize("block", [0, -1])
def test_tile_without_tokens_is_refused(block):
    with pytest.raises(ValueError, match=f"at least 1 token, not {block}"):
        list(masks.tiles(3, block))


@given(st.integers(0, 2**32 - 1))
def test_masked_product_of_integers_is_the_plain_one(seed):
    # Sums of small integers are exact in any order.
    rng = np.random.default_rng(seed)
    weights = rng.integers(-9, 9, (2, 4, 5)).astype(float)
    values = rng.integers(-9, 9, (2, 5, 3)).astype(float)
    visible = rng.random((4, 5)) < 0.5
    expected = np.where(visible, weights, 0) @ values
    got = masks.masked_product(weights, values, visible)
    assert_arrays_equal(got, expected, "got")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_invisible_values_do_not_matter(bad):
    visible = np.array([[True, False], [True, True]])
    values = np.array([[1.0, 2.0], [bad, 4.0]])
    product = masks.masked_product(np.ones((2, 2)), values, visible)
    assert_arrays_equal(product, [[1, 2], [1 + bad, 6]], "product")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_invisible_weights_do_not_matter(bad):
    visible = np.array([[True, False], [True, True]])
    weights = np.array([[1.0, bad], [1.0, 1.0]])
    product = masks.masked_product(weights, np.ones((2, 3)), visible)
    assert_arrays_equal(product, [[1, 1, 1], [2, 2, 2]], "product")


def test_visible_zero_weight_times_nan_is_nan():
    values = np.array([[1.0, np.nan]])
    product = masks.masked_product(np.zeros((1, 1)), values)
    assert_arrays_equal(product, [[0, np.nan]], "product")


def test_nan_in_one_leading_index_stays_there():
    values = np.ones((2, 3, 2))
    values[0, 1, 0] = np.nan
    product = masks.masked_product(np.ones((2, 4, 3)), values)
    assert_all(product[0, :, 0], np.nan, "product[0, :, 0]")
    assert_arrays_equal(product[0, :, 1], 3, "product[0, :, 1]")
    assert_arrays_equal(product[1], 3, "product[1]")


@pytest.mark.parametrize("seed", range(20))
def test_masked_product_of_any_numbers_is_the_sum_of_visible_terms(seed):
    # Sums of small integers are exact in any order.
    rng = np.random.default_rng(seed)
    numbers = [0, 0, 1, 1, 1, -1, 2, np.inf, -np.inf, np.nan]
    weights, values = rng.choice(numbers, (2, 3, 1, 4, 4))
    visible = rng.random((4, 4)) < 0.3
    with np.errstate(invalid="ignore"):
        terms = weights[..., :, :, None] * values[..., None, :, :]
        expected = np.where(visible[..., None], terms, 0).sum(axis=-2)
    got = masks.masked_product(weights, values, visible)
    assert_arrays_equal(got, expected, "got")
