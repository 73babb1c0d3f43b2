"""merge_states: merging softmax states."""

import numpy as np
import pytest

import strategies
from cuflash.request.problem import MOST_STATES
from helpers import calls, expected
from helpers.backends import on_backends
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_finite,
    assert_matches,
)
from helpers.data import Case, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.softmax_states import merged, states

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@on_each_backend(strategies.cases, each={"dtype": DTYPES})
def test_against_float64(backend, case):
    given_states = states(case, 1 + case.seed % 5)
    out, lse = calls.merge_states(backend, case, *given_states)
    want_out, want_lse = merged(*given_states)
    assert_matches(out, want_out, "out", case)
    assert_matches(lse, want_lse, "lse", case)


@on_backends
@dtypes
@pytest.mark.parametrize("count", [1, 8, 9, 70])
def test_many_states(backend, dtype, count):
    """In one launch: two structs, several groups of 32 lanes."""
    case = case_of(dtype, count)
    given = states(case, count)
    out, lse = calls.merge_states(backend, case, *given)
    want_out, want_lse = merged(*given)
    assert_matches(out, want_out, "out", case)
    assert_matches(lse, want_lse, "lse", case)


@on_backends
def test_more_states_than_one_launch_takes(backend):
    """Their results are merged: a rounding of out more, and of lse."""
    case = Case("float32", 1, 3, head_dim_v=5, seed=4)
    given = states(case, MOST_STATES + 2)
    out, lse = calls.merge_states(backend, case, *given)
    first, last = given[: 2 * MOST_STATES], given[2 * MOST_STATES :]
    groups = [calls.merge_states(backend, case, *x) for x in (first, last)]
    want = calls.merge_states(backend, case, *groups[0], *groups[1])
    assert_bitwise(out, want[0], "out")
    assert_bitwise(lse, want[1], "lse")


def case_of(dtype, seed):
    return Case(dtype, 2, 19, num_heads_q=3, head_dim_v=20, seed=seed)


@on_backends
@dtypes
@pytest.mark.parametrize("side", ["left", "right"])
def test_minus_infinity_is_the_identity(backend, dtype, side):
    case = case_of(dtype, 1)
    out, lse, empty_out, empty_lse = states(case)
    out[0, 0, 0, 0] = -0.0
    empty_out[...], empty_lse[...] = 0, -np.inf
    pair = [out, lse], [empty_out, empty_lse]
    first, second = pair if side == "right" else pair[::-1]
    got_out, got_lse = calls.merge_states(backend, case, *first, *second)
    assert_bitwise(got_out, out, "out")
    assert_bitwise(got_lse, lse, "lse")


@on_backends
@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_blind_side_takes_no_part(backend, dtype, side, bad):
    """For any out of that side: weight 0 times inf would be NaN."""
    case = case_of(dtype, 3)
    out, lse, blind_out, blind_lse = states(case)
    blind_out[...], blind_lse[...] = bad, -np.inf
    blind = [blind_out, blind_lse]
    given = {"left": (blind, [out, lse]), "right": ([out, lse], blind)}
    first, second = given.get(side, (blind, blind))
    got_out, got_lse = calls.merge_states(backend, case, *first, *second)
    if side == "both":
        out, lse = np.zeros_like(out), blind_lse
    assert_bitwise(got_out, out, "out")
    assert_bitwise(got_lse, lse, "lse")


@on_backends
@dtypes
@pytest.mark.parametrize("other", [0.0, -np.inf, np.inf, np.nan])
def test_an_infinite_lse_stays(backend, dtype, other):
    """A score overflowed: out is NaN, on one side or on both."""
    case = case_of(dtype, 4)
    out_a, lse_a, out_b, lse_b = states(case)
    out_a[...], lse_a[...], lse_b[...] = np.nan, np.inf, other
    for given in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = calls.merge_states(backend, case, *given)
        assert_all(out, np.nan, "out", case)
        assert_all(lse, np.inf, "lse", case)


@on_backends
@dtypes
@pytest.mark.parametrize("huge", [1e30, -1e30])
def test_far_apart_the_larger_one_stays(backend, dtype, huge):
    case = case_of(dtype, 2)
    out_a, lse_a, out_b, lse_b = states(case)
    lse_a[...], lse_b[...] = np.maximum(huge, 0), np.minimum(huge, 0)
    out, lse = calls.merge_states(backend, case, out_a, lse_a, out_b, lse_b)
    assert_bitwise(out, out_a, "out")
    assert_bitwise(lse, lse_a, "lse")


@on_backends
@pytest.mark.parametrize("nan_at", range(4))
def test_the_maximum_skips_nan_whatever_stands_beside_it(backend, nan_at):
    """Lanes that reduce a maximum must not lose others to a NaN."""
    case = case_of("float32", 5)
    given = states(case, 4)
    for i in range(4):
        given[2 * i + 1][...] = np.inf if i == nan_at ^ 1 else 0.0
    given[2 * nan_at + 1][...] = np.nan
    out, lse = calls.merge_states(backend, case, *given)
    assert_all(out, np.nan, "out")
    assert_all(np.isposinf(lse), True, "np.isposinf(lse)")


@on_backends
def test_nan_in_a_state_of_weight_zero(backend):
    """0 times NaN is NaN, as in one softmax over all the keys."""
    case = case_of("float32", 6)
    out_a, lse_a, out_b, lse_b = states(case)
    out_a[..., 3], lse_a[...], lse_b[...] = np.nan, -1e6, 0.0
    out, _ = calls.merge_states(backend, case, out_a, lse_a, out_b, lse_b)
    assert_all(out[..., 3], np.nan, "out[..., 3]")
    assert_finite(out[..., 4:], "out[..., 4:]")


@on_each_backend(strategies.cases, causal=False)
def test_merging_two_halves_of_the_keys(backend, case):
    q, k, v, _ = inputs(case)
    cut = case.seed % (case.seqlen_k + 1)
    halves = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    a, b = (calls.forward(backend, case, q, *half) for half in halves)
    out, lse = calls.merge_states(backend, case, *a, *b)
    want = expected.forward(q, k, v, **case.meaning())
    parts = [expected.forward(q, *half, **case.meaning()) for half in halves]
    tiny = propagated(merged(*a, *b), parts)
    assert_matches(out, exactly(want[0], tiny[0]), "out", case)
    assert_matches(lse, exactly(want[1], tiny[1]), "lse", case)


def propagated(merge, parts):
    """Bounds of (out, lse) from those of merging and of both halves.

    Weights sum to 1, so an average is off by no more than its worse part;
    an error of a half's lse is one of its weight relative to itself.
    """
    out, lse = (
        np.maximum(*(part[i].bound() for part in parts)) for i in range(2)
    )
    largest = np.maximum(*(np.abs(part[0].ref) for part in parts))
    of_lse = 2 * lse.swapaxes(1, 2)[..., None] * largest
    return merge[0].tiny + out + of_lse, merge[1].tiny + lse


def exactly(want, tiny):
    return want._replace(low=want.ref, tiny=tiny)
