"""Drawn functions: graphs mean what NumPy makes of the same function."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.expressions import derivative
from cuflash.expressions.evaluate import ModArrays, Values
from cuflash.reference import expressions as reference
from expression_strategies import ARRAYS, Drawn, masks, scores
from helpers.compare import assert_all
from helpers.expression_calls import (
    Pairs,
    given_of,
    gradient_sums,
    mod_arrays,
    plain,
    recorded,
)
from helpers.expression_rounding import DOUBLE, assert_within

QUERIES, KEYS = 21, 23
SEEDS = st.integers(0, 2**16)
# No kernel is compiled: a function takes 5 ms.
many = settings(max_examples=25 * settings().max_examples)


def drawn_call(function, seed):
    """Return the function's graph, arrays and numbers, values, and pairs."""
    values = mod_arrays(seed)
    _, *own = given_of(values)
    pairs = Pairs.drawn(seed, QUERIES, KEYS, np.float64)
    return recorded(function, values), own, values, pairs


@many
@given(st.one_of(scores(), masks()), SEEDS)
@example(Drawn("mask_mod", "(np.int64(0) < q_idx)"), 0)
@example(Drawn("mask_mod", "(q_idx >= kv_idx) < on"), 0)
@example(Drawn("mask_mod", "np.isinf(n) | np.isnan(q_idx)"), 0)
@example(Drawn("score_mod", "score + far[q_idx] * 0.5"), 1)
def test_a_graph_is_numpys_function(function, seed):
    node, own, values, pairs = drawn_call(function, seed)
    want = pairs.bounded(node, own, DOUBLE)
    assert_within(plain(function, values, pairs), want, "plain")
    (got,) = Values(pairs.leaves(), ModArrays(*own), np.float64).of(node)
    assert_within(pairs.full(got), want, "evaluated")


@many
@given(scores(), SEEDS)
@example(Drawn("score_mod", "np.log(np.where(q_idx > 3, score, 0.0))"), 0)
@example(Drawn("score_mod", "np.where(on, score / 0.0, score)"), 0)
@example(Drawn("score_mod", "np.sqrt(np.maximum(score, 0))"), 0)
@example(Drawn("score_mod", "(0.5 + abs(score)) ** (w * score)"), 0)
@example(Drawn("score_mod", "table[h, q_idx - kv_idx] * curve[kv_idx]"), 0)
def test_derivatives_are_those_of_dual_numbers(function, seed):
    node, own, values, pairs = drawn_call(function, seed)
    want = _of_dual_numbers(function, values, pairs)
    slope = pairs.bounded(derivative.slope(node), own, DOUBLE)
    known = np.isfinite(slope.value) & np.isfinite(want.slope)
    slope = slope._replace(doubt=slope.doubt | ~known)
    assert_within(pairs.full(want.slope), slope, "slope")

    terms = np.random.default_rng(seed).integers(-8, 9, known.shape) / 8
    totals = {x: np.zeros(values[x].shape) for x in _REALS}
    reference.add_gradients(totals, want.gathers, terms)
    for slot, name in enumerate(sorted(ARRAYS)):
        if name in _REALS:
            sums = gradient_sums(node, slot, terms, pairs, own, DOUBLE)
            odd = sums.doubt | ~np.isfinite(totals[name])
            assert_within(totals[name], sums._replace(doubt=odd), name)


@many
@given(scores(), SEEDS)
@example(Drawn("score_mod", "np.where(score > 0, score**2 * w, score)"), 0)
@example(Drawn("score_mod", "np.log(np.where(q_idx > 3, score, 1.0))"), 0)
@example(Drawn("score_mod", "np.sqrt(np.maximum(score, 0))"), 0)
@example(Drawn("score_mod", "abs(score) ** 1.5 + np.cos(score) ** 2"), 0)
@example(Drawn("score_mod", "(1.5 + abs(score)) ** score"), 0)  # 0 is drawn
def test_slopes_of_slopes_are_those_of_dual_numbers(function, seed):
    """Where they are finite: both leave out what has a slope of 0."""
    node, own, values, pairs = drawn_call(function, seed)
    with np.errstate(all="ignore"):
        want = reference.moving(
            function.function, pairs.score, _place(pairs), values,
            np.ones(()), {}, _REALS,
        )  # fmt: skip
    slope = derivative.slope(derivative.slope(node))
    got = pairs.bounded(slope, own, DOUBLE)
    known = np.isfinite(got.value) & np.isfinite(want.slope)
    got = got._replace(doubt=got.doubt | ~known)
    assert_within(pairs.full(want.slope), got, "slope of the slope")


_REALS = ("table", "curve", "half")


def _place(pairs):
    return reference.Place(
        np.arange(QUERIES), np.arange(KEYS), QUERIES, KEYS,
        reference.HeadIndices(pairs.b, pairs.h),
    )  # fmt: skip


def _of_dual_numbers(function, values, pairs):
    with np.errstate(all="ignore"):
        return reference.score(
            function.function, pairs.score, _place(pairs), values, _REALS
        )


def test_ints_have_64_bits():
    """Products of 32-bit indices, too, on NumPy arrays."""

    def drawn(b, h, q_idx, kv_idx):
        return (kv_idx + 1) * 2000000011 % 7 < 3

    q, v = np.zeros((6, 4), np.float32), np.eye(6, dtype=np.float32)
    seen = cuflash.forward(q, q, v, mask_mod=drawn)[0] > 0
    want = [(j + 1) * 2000000011 % 7 < 3 for j in range(6)]
    assert_all(seen, want, "seen")
