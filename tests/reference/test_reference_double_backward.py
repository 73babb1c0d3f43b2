"""Gradients of the gradients against steps of the gradients.

The Hessian of <dO, O> + <dlse, lse> is symmetric: its product with the
cotangents is the derivative of dq, dk, dv, dbias and dsink in the direction
of the cotangents.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.attention import attention
from cuflash.reference.backward import key_outer
from cuflash.reference.double_backward import double_backward
from cuflash.reference.jvp import jvp
from helpers.compare import assert_all, assert_arrays_equal, assert_elements
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    bounds,
)
from helpers.reference_directions import (
    INPUTS,
    backward_of,
    cotangents_of,
    derivative,
    derivative_bounds,
    difference,
    direction_of,
    inputs_of,
)
from reference_strategies import optional_cases

names_of_cotangents = st.sets(st.sampled_from(INPUTS))


def second(case, direction, **changed):
    """Return the result of a case, with arrays that replace its own."""
    q, k, v, _ = case.arrays()
    dout, dlse = cotangents_of(case)
    out, lse = attention(q, k, v, **case.meaning())
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    given |= {f"dd{x}": direction.get(x) for x in INPUTS}
    given |= {"dlse": dlse, **case.meaning(), **case.blocks(), **changed}
    return double_backward(**given)


def assert_second(got, expected, bound, extra=lambda name: 0.0):
    """Assert the gradients of q, k, v, bias and sink."""
    for name in expected:
        limit = getattr(bound, name) + extra(name)
        want = np.float64(expected[name])
        assert_close(getattr(got, f"d2{name}"), want, limit, name)


@given(optional_cases(), names_of_cotangents)
def test_second_gradients_are_complex_steps(case, names):
    direction = direction_of(case, names)
    got = second(case, direction)
    expected = derivative(backward_of(case), inputs_of(case), direction)
    assert_second(got, expected, derivative_bounds(case, direction))


@given(optional_cases())
def test_second_gradients_are_central_differences(case):
    """As in test_reference_jvp.py."""
    direction, h = direction_of(case, INPUTS), 2.0**-20
    given = backward_of(case), inputs_of(case), direction
    once, twice = difference(*given, h), difference(*given, 2 * h)
    rounded = bounds(case, *case.arrays()[:3], *cotangents_of(case))
    finer = float(np.finfo(np.longdouble).eps) / EPS

    def extra(name):
        higher = abs(once[name] - twice[name]).max(initial=0)
        return float(higher) + getattr(rounded, f"d{name}") * finer / h

    got, bound = second(case, direction), derivative_bounds(case, direction)
    assert_second(got, once, bound, extra)


@given(optional_cases(), names_of_cotangents)
def test_ddout_and_ddlse_are_the_jvp(case, names):
    direction = direction_of(case, names)
    got = second(case, direction)
    dots = {f"{x}_dot": direction.get(x) for x in INPUTS}
    expected = jvp(*case.arrays()[:3], **dots, **case.meaning())
    bound = derivative_bounds(case, direction)
    assert_close(got.ddout, expected.out_dot, bound.out_dot)
    assert_close(got.ddlse, expected.lse_dot, bound.lse_dot)


def loss(case, direction):
    """Return the inner product of gradients and cotangents, and its error."""
    q, k, v, _ = case.arrays()
    dout, dlse = cotangents_of(case)
    out, lse = attention(q, k, v, **case.meaning())
    given = dout, q, k, v, out, lse
    gradients = key_outer(*given, dlse=dlse, **case.meaning())
    bound, total, error = bounds(case, q, k, v, dout, dlse), 0.0, 0.0
    names = [name for name in INPUTS if name in direction]
    for name, gradient in zip(names, gradients, strict=True):
        total += (direction[name] * gradient).sum()
        one = getattr(bound, f"d{name}")
        one += gradient.size * EPS * abs(gradient).max(initial=0)
        error += one * abs(direction[name]).sum()
    return total, error


@given(optional_cases())
def test_ddout_and_ddlse_are_gradients_of_the_loss(case):
    """The loss is linear in dout and dlse: these are its factors."""
    direction = direction_of(case, INPUTS)
    got, (dout, dlse) = second(case, direction), cotangents_of(case)
    total, error = loss(case, direction)
    bound = derivative_bounds(case, direction)
    pairs = (got.ddout, dout, bound.out_dot), (got.ddlse, dlse, bound.lse_dot)
    for factor, x, one in pairs:
        total -= (factor * x).sum()
        one += x.size * EPS * abs(factor).max(initial=0)
        error += one * abs(x).sum()
    assert abs(total) <= error


def test_no_cotangent_is_zero():
    got = second(ReferenceCase((2,), 5, 7), {})
    for x in (*got[:4], got.ddlse):
        assert_all(x, 0, "x")
    assert got.d2bias is got.d2sink is None


def test_rows_that_see_nothing_contribute_nothing():
    """Even if their q, dout and cotangents are NaN."""
    options = {"softcap": 2.0, "arrays_of": ("bias",)}
    case = ReferenceCase((2,), 5, 3, causal=True, **options)  # two see no key
    q, (dout, _) = case.arrays()[0], cotangents_of(case)
    direction = direction_of(case, "qkv")
    expected = second(case, direction)
    q[:, :2] = dout[:, :2] = direction["q"][:, :2] = np.nan
    got = second(case, direction, q=q, dout=dout)
    for a, b in zip(got, expected, strict=True):
        if a is not None:
            assert_arrays_equal(a, b, "a")
    assert_all(got.d2q[:, :2], 0, "got.d2q[:, :2]")
    assert_all(got.ddout[:, :2], 0, "got.ddout[:, :2]")
    assert_all(got.ddlse[:, :2], 0, "got.ddlse[:, :2]")


@pytest.mark.parametrize("name", ["k", "v", "ddk", "ddv"])
def test_a_masked_nan_does_not_spread(name):
    case, mask = ReferenceCase((2,), 6, 6), np.arange(6) != 2
    direction = direction_of(case, "qkv")
    given = {**dict(zip("qkv", case.arrays(), strict=False))}
    given |= {f"dd{x}": direction[x] for x in "qkv"}
    out, lse = attention(*case.arrays()[:3], mask=mask, heads_first=True)
    known = {"mask": mask, "out": out, "lse": lse}
    expected = second(case, direction, **known)
    given[name][:, 2] = np.nan
    got = second(case, direction, **known, **{name: given[name]})
    for a, b in zip(got, expected, strict=True):
        if a is not None:
            assert_arrays_equal(a, b, "a")


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_visible_nan_reaches_the_rows_that_read_it(name):
    """Row 3 of ddq, or key 3 of ddk, of a causal call of six tokens."""
    case = ReferenceCase((), 6, 6, causal=True)
    direction = direction_of(case, "qkv")
    direction[name][3] = np.nan
    got, token = second(case, direction), np.arange(6)
    rows = token == 3 if name == "q" else token >= 3
    keys = token <= 3 if name == "q" else token < 6
    for x, nan in ((got.d2q, rows), (got.ddout, rows), (got.d2k, keys)):
        assert_elements(
            np.isnan(x).all(axis=-1), nan, "np.isnan(x).all(axis=-1)"
        )
    assert_elements(np.isnan(got.ddlse), rows, "np.isnan(got.ddlse)")


def test_a_sink_of_minus_infinity_is_none():
    case = ReferenceCase((2,), 5, 3, causal=True)  # two rows see no key
    direction = direction_of(case, "qkv")
    none = {"sink": np.full(2, -np.inf), "ddsink": np.ones(2)}
    q, k, v, _ = case.arrays()
    given = case.meaning() | {"sink": none["sink"]}
    out, lse = attention(q, k, v, **given)
    got = second(case, direction, out=out, lse=lse, **none)
    expected = second(case, direction)
    assert_all(got.d2sink, 0, "got.d2sink")
    for name in ("d2q", "d2k", "d2v", "ddout", "ddlse"):
        a, b = getattr(got, name), getattr(expected, name)
        assert_arrays_equal(a, b, "a")


def test_heads_first_is_asked_for():
    q, lse = np.zeros((2, 5, 4)), np.zeros((2, 5))
    with pytest.raises(ValueError, match="heads_first"):
        double_backward(q, q, q, q, q, q, q, q, lse)
