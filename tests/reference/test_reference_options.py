"""Masks, score modifications, sink and dropout, all drawn together."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.special
from hypothesis import assume, given

from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.dropout import Dropout
from cuflash.reference.forward import query_outer
from cuflash.reference.options import Queries
from helpers.compare import assert_allclose, assert_arrays_equal
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    backward_results,
    bounds,
    forward_results,
)
from helpers.reference_dense import dense_scores, keep_factors
from reference_strategies import optional_cases


def dense_weights(case, q, k):
    """Return P and lse by SciPy; a sink is another key."""
    s = dense_scores(case, q, k)
    sink = case.meaning().get("sink")
    sink = np.full((), -np.inf) if sink is None else sink
    column = np.broadcast_to(sink[..., None, None], (*s.shape[:-1], 1))
    s = np.concatenate([s, column], axis=-1)
    lse = scipy.special.logsumexp(s, axis=-1)
    blind = (lse == -np.inf)[..., None]
    p = scipy.special.softmax(np.where(blind, 0, s), axis=-1)
    return np.where(blind, 0, p)[..., :-1], lse


@given(optional_cases())
def test_out_is_scipys_softmax_times_v(case):
    assume(case.seqlen_k)
    q, k, v, dout = case.arrays()
    p, expected_lse = dense_weights(case, q, k)
    out, lse = attention(q, k, v, **case.meaning())
    bound = bounds(case, q, k, v, dout)
    assert_close(out, (p * keep_factors(case)) @ v, bound.out)
    assert_close(lse, expected_lse, bound.lse)


@given(optional_cases())
def test_every_forward_schedule_equals_attention(case):
    q, k, v, dout = case.arrays()
    expected, expected_lse = attention(q, k, v, **case.meaning())
    bound = bounds(case, q, k, v, dout)
    for name, (out, lse) in forward_results(case, q, k, v):
        assert_close(out, expected, bound.out, name)
        assert_close(lse, expected_lse, bound.lse, name)


@given(optional_cases())
def test_every_backward_schedule_equals_the_vjp(case):
    q, k, v, dout = case.arrays()
    out, lse = attention(q, k, v, **case.meaning())
    expected = attention_vjp(dout, q, k, v, **case.meaning())
    limits = bounds(case, q, k, v, dout).gradients(case)
    for name, got in backward_results(case, dout, q, k, v, out, lse):
        for a, b, bound in zip(got, expected, limits, strict=True):
            assert_close(a, b, bound, name)


ARGUMENTS = ("q", "k", "v", "bias", "sink")


@given(optional_cases())
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradient_is_the_finite_difference(name, case):
    q, k, v, dout = case.arrays()
    given = {"q": q, "k": k, "v": v, **case.meaning()}
    assume(given.get(name) is not None and given[name].size)
    rng = np.random.default_rng(case.seed + 2)
    direction = rng.standard_normal(given[name].shape)
    direction /= np.linalg.norm(direction)

    def slope(h):
        losses = []
        for step in (h, -h):
            moved = {**given, name: given[name] + step * direction}
            losses.append((dout * attention(**moved)[0]).sum())
        return (losses[0] - losses[1]) / (2 * h)

    asked = [x for x in ARGUMENTS if given.get(x) is not None]
    gradients = attention_vjp(dout, q, k, v, **case.meaning())
    got = (gradients[asked.index(name)] * direction).sum()
    # As in reference/test_attention.py: |D(2h) - D(h)| is three times the
    # error of D(h), but for higher orders; and the loss is rounded.
    h = 1e-4
    once, twice = slope(h), slope(2 * h)
    rounding = bounds(case, q, k, v, dout).out + dout.size * EPS
    atol = abs(twice - once) + rounding * abs(dout).sum() * 10 / h
    assert_allclose(got, once, "got", atol=atol)


def plain(**changes):
    """Return a case without options, except `changes`."""
    return replace(ReferenceCase((2,), 5, 7), **changes)


def test_a_sink_takes_all_that_a_row_without_keys_has():
    case = plain(seqlen_k=0, arrays_of=("sink",))
    q, k, v, _ = case.arrays()
    out, lse = attention(q, k, v, **case.meaning())
    sink = case.meaning()["sink"]
    assert_arrays_equal(out, np.zeros((2, 5, 4)), "out")
    assert_arrays_equal(lse, np.repeat(sink[:, None], 5, axis=1), "lse")


HEADS = {"heads_first": True}


def test_a_sink_of_minus_infinity_is_none():
    case = plain(causal=True, seqlen_k=3)  # and rows that see nothing
    q, k, v, dout = case.arrays()
    none = np.full((2,), -np.inf)
    got = attention(q, k, v, causal=True, sink=none, **HEADS)
    for a, b in zip(
        got, attention(q, k, v, causal=True, **HEADS), strict=True
    ):
        assert_arrays_equal(a, b, "a")
    *_, dsink = attention_vjp(dout, q, k, v, causal=True, sink=none, **HEADS)
    assert_arrays_equal(dsink, [0, 0], "dsink")


def test_masked_nan_does_not_spread():
    case = plain()
    q, k, v, dout = case.arrays()
    mask = np.arange(7) != 3
    want = attention(q, k, v, mask=mask, **HEADS)
    gradients = attention_vjp(dout, q, k, v, mask=mask, **HEADS)
    k[:, 3], v[:, 3] = np.nan, np.inf
    got = attention(q, k, v, mask=mask, **HEADS)
    for a, b in zip(got, want, strict=True):
        assert_arrays_equal(a, b, "a")
    for a, b in zip(
        attention_vjp(dout, q, k, v, mask=mask, **HEADS),
        gradients,
        strict=True,
    ):
        assert_arrays_equal(a, b, "a")


def test_softcap_of_small_scores_is_the_score():
    q, k, v, _ = plain().arrays()
    capped, _ = attention(q, k, v, softcap=1e9, **HEADS)
    assert_close(
        capped, attention(q, k, v, **HEADS)[0], 1e-9
    )  # s - s^3 / 3 cap^2


def test_each_head_has_its_alibi_slope():
    q, k, v, _ = plain().arrays()
    slopes = np.array([0.0, 1e4])
    out, _ = attention(q, k, v, alibi_slopes=slopes, **HEADS)
    assert_arrays_equal(out[0], attention(q, k, v, **HEADS)[0][0], "out[0]")
    # The last query stands at the last key, and sees little but it.
    assert_arrays_equal(out[1], v[1, 2:], "out[1]")


@pytest.mark.parametrize("schedule", [attention, query_outer])
def test_some_queries_are_rows_of_the_whole(schedule):
    """Masks, distances and dropout know where they are.

    Sums of at most 40 terms below 8, in another order: 40 * 8 * 2^-53, once
    in each, is less than 2^-43.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 4)) for n in (30, 40, 40))
    index = np.array([0, 3, 4, 17, 29])
    options = {
        "window": (20, 3),
        "alibi_slopes": np.array(0.5),
        "dropout": Dropout(0.3, 5),
    }
    out, lse = schedule(q, k, v, **options)
    queries = Queries(index, 30)
    some = schedule(q[index], k, v, **options, queries=queries)
    assert np.abs(some[0] - out[index]).max() <= 2.0**-43
    assert np.abs(some[1] - lse[index]).max() <= 2.0**-43
