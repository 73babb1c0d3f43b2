"""The polynomials with which 16-bit kernels compute tanh of small scores."""

import math

import numpy as np
import pytest

from cuflash.request.softcap import (
    POLY3_COEFFICIENTS,
    POLY3_MOST,
    POLY4_COEFFICIENTS,
    POLY4_MOST,
    poly3_terms,
    terms,
)
from helpers.compare import assert_allclose, assert_at_most

SCALES = [
    *[(64**-0.5, 30.0), (128**-0.5, 50.0), (1.0, 0.5), (0.01, 300.0)],
    *[(0.125, 1e5), (2.0**-20, 1e5), (1.0, 1e30)],
]

U = 2.0**-24


def horner(coefficients, x, dtype):
    """As by FMA: a float64 sum of a float32 product is exact."""
    y = np.full_like(x, coefficients[-1], dtype)
    for c in coefficients[-2::-1]:
        exact = y.astype(np.float64) * x + np.float64(dtype(c))
        y = exact.astype(dtype)
    return y


@pytest.mark.parametrize(
    ("coefficients", "square", "largest", "relative"),
    [(POLY4_COEFFICIENTS, POLY4_MOST, 1.3, 7.4),
     (POLY3_COEFFICIENTS, POLY3_MOST, 3.3, 23)],
)  # fmt: skip
def test_its_largest_error_is_smallest(
    coefficients, square, largest, relative
):
    """Four are alike in size and differ in sign: none of the degree is better.

    (Chebyshev: of three free coefficients, and x^3 as a weight, which has one
    sign. Of two, three are.)
    """
    x = np.linspace(1e-2, math.sqrt(square), 200_001)
    error = x * horner(coefficients, x * x, np.float64) - np.tanh(x)
    assert abs(error).max() <= largest * U
    assert abs(error / x).max() <= relative * U
    turns = np.flatnonzero(np.diff(np.sign(error)))
    parts = np.split(error, turns + 1)
    peaks = [part[abs(part).argmax()] for part in parts]
    assert coefficients[0] == 1
    assert len(peaks) == len(coefficients)
    assert_allclose(
        np.abs(peaks), abs(error).max(), "np.abs(peaks)", rtol=0.01
    )


@pytest.mark.parametrize(("scale", "softcap"), SCALES)
def test_small_scores_are_right_to_their_bound(scale, softcap):
    """As kernels compute them.

    In units u = 2^-24, relatively: 1.07 for the first term (p is 0.937 or
    more), 1 for the last multiply-add, 1 for the product; what is added to
    that term is at most 0.067 of it and errs by 3.2. That is 3.3 of a tanh of
    at most 0.42. The polynomial adds 1.3, or relatively 7.4. A tanh got by
    the inverse has two roundings more.
    """
    t, t_log2, small, inverse_log2 = terms(scale, softcap)
    products = np.linspace(-1, 1, 20_001) * math.sqrt(np.float32(small))
    products = products.astype(np.float32)
    exact = np.tanh(products.astype(np.float64) * scale / softcap)
    square = products * products
    score = products * horner(t, square, np.float32)
    score_log2 = products * horner(t_log2, square, np.float32)
    tanh = score_log2 * np.float32(inverse_log2)
    of_score = score / np.float64(softcap)
    of_log2 = score_log2 / (softcap * math.log2(math.e))
    for got, more in (of_score, 0), (of_log2, 0), (tanh, 2):
        error = abs(got - exact)
        assert error.max() <= ((3.3 + more) * 0.42 + 1.3) * U
        assert_at_most(error, (3.3 + more + 7.4) * U * abs(exact), "error")


@pytest.mark.parametrize("dropout", [0.0, 0.9])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("scale", "softcap"), SCALES)
def test_slight_scores_are_right_to_their_bound(
    scale, softcap, dtype, dropout
):
    """And weights, relative to the least maximum, are numbers of the dtype.

    Errors as of small scores, with 3.3 for the polynomial, of a tanh of at
    most 0.28: 4.2 units, where tests/helpers/rounding.py gives a kernel 8.
    Relatively 23 for the polynomial: 27.
    """
    t, most, lowest = poly3_terms(scale, softcap, dtype, dropout)
    products = np.linspace(-1, 1, 20_001) * np.float32(most)
    products = products.astype(np.float32)
    exact = np.tanh(products.astype(np.float64) * scale / softcap)
    score = products * horner(t, products * products, np.float32)
    of_log2 = score / (softcap * math.log2(math.e))
    error = abs(of_log2 - exact)
    assert error.max() <= (3.3 * 0.28 + 3.3) * U
    assert_at_most(error, (3.3 + 23) * U * abs(exact), "error")
    weight = 2.0 ** (np.float64(score.max()) - lowest) / (1.0 - dropout)
    assert weight <= {"float16": 2.0**15, "bfloat16": 2.0**60}[dtype] * 1.001


@pytest.mark.parametrize(("scale", "softcap"), SCALES[:2])
def test_slight_scores_are_not_rare(scale, softcap):
    """Up to 8, with row maxima of -2 or more."""
    for dtype in ("float16", "bfloat16"):
        _, most, lowest = poly3_terms(scale, softcap, dtype, 0.0)
        assert lowest <= -3.0
        assert scale * most >= 8.0
        assert np.float32(most).view(np.uint32) % 2**16 == 0


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [(0.125, 0.0), (-0.125, 30.0), (0.0, 30.0), (1e-7, 1e30), (1e30, 1.0),
     (1e-30, 1e-30), (1e30, 1e30), (1.0, 1e-300), (math.nan, 30.0)],
)  # fmt: skip
def test_no_range_where_the_polynomial_fails(scale, softcap):
    t, t_log2, small, _ = terms(scale, softcap)
    assert small < 0
    assert not any((*t, *t_log2))
    t_log2, most, _ = poly3_terms(scale, softcap, "bfloat16", 0.0)
    assert most == 0
    assert not any(t_log2)


@pytest.mark.parametrize("exponent", [-20, 20])
@pytest.mark.parametrize("of_ratio", [-100, -16, 16])
def test_all_that_is_passed_is_a_normal_number(exponent, of_ratio):
    """Or 0, where a term of a large softcap would not be normal."""
    scale = 2.0**exponent
    t, t_log2, small, inverse_log2 = terms(scale, scale / 2.0**of_ratio)
    poly3_log2, most, _ = poly3_terms(
        scale, scale / 2.0**of_ratio, "float16", 0.0
    )
    of_poly3 = *poly3_log2, most
    for x in (*t, *t_log2, small, inverse_log2, *of_poly3):
        assert 2.0**-126 <= abs(x) < 2.0**127 or (x == 0 and of_ratio < -16)
