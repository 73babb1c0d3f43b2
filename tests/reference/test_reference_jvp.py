"""Tangents of out and lse against complex steps and central differences."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.attention import attention
from cuflash.reference.jvp import jvp
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_elements,
    assert_finite,
)
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    bounds,
)
from helpers.reference_directions import (
    INPUTS,
    derivative,
    derivative_bounds,
    difference,
    direction_of,
    forward_of,
    inputs_of,
    with_directions_first,
)
from reference_strategies import optional_cases

names_of_tangents = st.sets(st.sampled_from(INPUTS))


def tangents(case, **arguments):
    return jvp(
        *case.arrays()[:3], **case.meaning(), **case.blocks(), **arguments
    )


def one(case, direction):
    return tangents(
        case, **{f"{name}_dot": x for name, x in direction.items()}
    )


@given(optional_cases(), names_of_tangents)
def test_tangents_are_complex_steps(case, names):
    direction = direction_of(case, names)
    got = one(case, direction)
    expected = derivative(forward_of(case), inputs_of(case), direction)
    bound = derivative_bounds(case, direction)
    assert_close(got.out_dot, np.float64(expected["out"]), bound.out_dot)
    assert_close(got.lse_dot, np.float64(expected["lse"]), bound.lse_dot)


@given(optional_cases())
def test_tangents_are_central_differences(case):
    """|D(2h) - D(h)| is three times D(h)'s error, but for higher orders.

    out and lse, in extended precision, have the bounds of float64 times the
    ratio of the roundings.
    """
    direction = direction_of(case, INPUTS)
    got = one(case, direction)
    given, h = (forward_of(case), inputs_of(case), direction), 2.0**-20
    once, twice = difference(*given, h), difference(*given, 2 * h)
    rounded = bounds(case, *case.arrays())
    bound = derivative_bounds(case, direction)
    finer = float(np.finfo(np.longdouble).eps) / EPS
    for name in ("out", "lse"):
        atol = getattr(bound, f"{name}_dot")
        atol += float(abs(once[name] - twice[name]).max(initial=0))
        atol += getattr(rounded, name) * finer / h
        expected = np.float64(once[name])
        assert_close(getattr(got, f"{name}_dot"), expected, atol)


@given(optional_cases())
def test_out_and_lse_are_those_of_the_forward_pass(case):
    got = one(case, direction_of(case, INPUTS))
    out, lse = attention(*case.arrays()[:3], **case.meaning())
    bound = bounds(case, *case.arrays())
    assert_close(got.out, out, bound.out)
    assert_close(got.lse, lse, bound.lse)


@given(optional_cases(), names_of_tangents, st.sampled_from([0, 1, 3]))
def test_several_directions_are_as_many_calls(case, names, count):
    directions = direction_of(case, names, (count,))
    several = tangents(case, **with_directions_first(case, directions))
    for n in range(count):
        direction = {name: x[n] for name, x in directions.items()}
        alone = one(case, direction)
        bound = derivative_bounds(case, direction)
        for name in ("out_dot", "lse_dot"):
            got, expected = getattr(several, name), getattr(alone, name)
            got = got[n] if direction else got
            assert_close(got, expected, getattr(bound, name))


def test_no_direction_is_zero():
    got = tangents(ReferenceCase((2,), 5, 7))
    assert_all(got.out_dot, 0, "got.out_dot")
    assert_all(got.lse_dot, 0, "got.lse_dot")


def test_rows_that_see_nothing_do_not_move():
    """Even if their inputs and tangents are NaN."""
    case = ReferenceCase((2,), 5, 3, causal=True)  # two rows see no key
    q, k, v, _ = case.arrays()
    moves = direction_of(case, "qkv")
    q[:, :2], moves["q"][:, :2] = np.nan, np.inf
    got = jvp(q, k, v, *moves.values(), causal=True, heads_first=True)
    assert_all(got.out_dot[:, :2], 0, "got.out_dot[:, :2]")
    assert_all(got.lse_dot[:, :2], 0, "got.lse_dot[:, :2]")
    assert_finite(got.out_dot, "got.out_dot")
    assert_all(got.out_dot[:, 2:] != 0, True, "out_dot[:, 2:] != 0")


def test_a_row_of_a_sink_alone_moves_with_it():
    case = ReferenceCase((2,), 5, 0, arrays_of=("sink",))
    direction = direction_of(case, ("sink",))
    got = one(case, direction)
    assert_all(got.out_dot, 0, "got.out_dot")
    expected = np.repeat(direction["sink"][:, None], 5, axis=1)
    assert_arrays_equal(got.lse_dot, expected, "got.lse_dot")


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_masked_tangent_does_not_spread(name, value):
    """The first key is behind every window, the last query sees nothing."""
    case = ReferenceCase((2,), 6, 6, window=(2, None))
    mask = np.ones((6, 6), bool)
    mask[:, 0] = mask[-1] = False
    moves = direction_of(case, "qkv")
    given = {**case.meaning(), "mask": mask}
    arrays = case.arrays()[:3]
    expected = jvp(*arrays, *moves.values(), **given)
    moves[name][:, -1 if name == "q" else 0] = value
    got = jvp(*arrays, *moves.values(), **given)
    for a, b in zip(got, expected, strict=True):
        assert_arrays_equal(a, b, "a")


@pytest.mark.parametrize("name", "qkv")
def test_a_visible_nan_reaches_the_rows_that_read_it(name):
    case = ReferenceCase((), 6, 6, causal=True)
    moves = direction_of(case, "qkv")
    moves[name][3] = np.nan
    got = one(case, moves)
    rows = np.arange(6) >= 3 if name != "q" else np.arange(6) == 3
    assert_elements(np.isnan(got.out_dot).all(axis=-1), rows, "got")
    reaches_lse = rows & (name != "v")
    assert_elements(
        np.isnan(got.lse_dot), reaches_lse, "np.isnan(got.lse_dot)"
    )


def test_an_infinite_score_makes_its_row_nan():
    case = ReferenceCase((), 4, 4)
    q, k, v, _ = case.arrays()
    q[1] = np.inf
    got = jvp(q, abs(k), v, *direction_of(case, "qkv").values())
    row = np.arange(4) == 1
    assert_elements(np.isnan(got.out_dot).all(axis=-1), row, "got")
    assert_elements(np.isnan(got.lse_dot), row, "np.isnan(got.lse_dot)")


def test_weights_of_zero_add_nothing():
    """A bias of -inf is a score of -inf: visible, and of weight 0."""
    case = ReferenceCase((), 5, 5)
    moves = direction_of(case, "qkv")
    bias = np.where(np.arange(5) < 3, 0, -np.inf)
    got = tangents(case, bias=bias, **dotted(moves))
    masked = tangents(case, mask=bias == 0, **dotted(moves))
    for a, b in zip(got, masked, strict=True):
        assert_allclose(a, b, "a", rtol=1e-14, atol=1e-15)


def dotted(moves):
    return {f"{name}_dot": x for name, x in moves.items()}


def test_a_sink_of_minus_infinity_does_not_move():
    case = replace(ReferenceCase((2,), 5, 3), causal=True)
    moves = dotted(direction_of(case, "qkv"))
    none = np.full(2, -np.inf)
    got = tangents(case, sink=none, sink_dot=np.ones(2), **moves)
    for a, b in zip(got, tangents(case, **moves), strict=True):
        assert_arrays_equal(a, b, "a")


def test_heads_first_is_asked_for():
    q = np.zeros((2, 5, 4))
    with pytest.raises(ValueError, match="heads_first"):
        jvp(q, q, q, q)
