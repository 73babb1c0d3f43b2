"""erf and erfc of NumPy arrays, against sums with 60 digits."""

import math
from decimal import Decimal, localcontext

import numpy as np

from cuflash.expressions import error_function
from helpers.compare import assert_all, assert_arrays_equal

# In 2^-53 of the result: error_function.py derives them.
BOUNDS = {"erf": 4, "erfc": 13}
# Where one formula ends and the next begins, and between.
EDGES = [0.0, 0.5, 1.0, 3.0, 9.5, 26.5]


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


def points():
    """Return numbers at, around and between the edges."""
    edges = np.array(EDGES)
    drawn = np.random.default_rng(0).uniform(edges[:-1], edges[1:], (12, 5))
    around = np.nextafter(edges[1:], 0), edges[1:], np.nextafter(edges[1:], 99)
    return np.concatenate([*around, drawn.ravel(), [1e-300, 2e-9]])


def exact(x):
    """Return erf and erfc of a number above 0: a series, or a fraction."""
    power = (-x * x).exp() / PI.sqrt()
    if x < 4:
        term = total = Decimal(1)
        for k in range(1, 200):
            term *= 2 * x * x / (2 * k + 1)
            total += term
        erf = 2 * x * power * total
        return erf, 1 - erf
    below = x
    for k in range(300, 0, -1):
        below = x + Decimal(k) / 2 / below
    return 1 - power / below, power / below


def test_within_the_bounds_of_their_derivation():
    with localcontext() as context:
        context.prec = 60
        for x in points():
            erf, erfc = exact(Decimal(float(x)))
            assert_near("erf", x, erf)
            assert_near("erf", -x, -erf)
            assert_near("erfc", x, erfc)
            assert_near("erfc", -x, 1 + erf)


def assert_near(name, x, want):
    got = Decimal(float(getattr(error_function, name)(x)))
    error = abs(got - want) / abs(want)
    assert error <= BOUNDS[name] * Decimal(2) ** -53, (name, x)


def test_ends_and_dtypes():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 40.0])
    found = error_function.erf(x)
    assert_arrays_equal(found, [0.0, -0.0, 1, -1, np.nan, 1], "erf")
    assert_all(np.signbit(found[1]), True, "sign of 0")
    found = error_function.erfc(x)
    assert_arrays_equal(found, [1.0, 1, 0, 2, np.nan, 0], "erfc")
    assert error_function.erf(np.float32(0.25)).dtype == np.float32
    assert error_function.erfc(x[:0]).shape == (0,)


def test_many_elements_are_computed_part_by_part():
    x = np.linspace(-4, 4, 5 * error_function._AT_ONCE // 2).reshape(2, -1)
    got = error_function.erf(x)
    for at in ((0, 0), (0, -1), (1, 3), (1, -1)):
        assert abs(got[at] - math.erf(x[at])) <= 2.0**-52
