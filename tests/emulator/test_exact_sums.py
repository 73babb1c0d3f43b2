"""Sums of score/exact_sums.cuh: every addend counts, whatever the order."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.compare import assert_arrays_equal
from helpers.small_kernels import on_both, read_only, run

WORDS = {"float32": 13, "float64": 89}
SUMS = 7


def summed(x, places, backend, seed=0):
    """The sums of x by place."""
    words = np.zeros((WORDS[x.dtype.name], SUMS), np.uint64)
    rounded = np.full(SUMS, 5, x.dtype)
    constants = {"Element": x.dtype.name.replace("float32", "float")}
    constants["Element"] = constants["Element"].replace("float64", "double")
    for step in (0, 1):
        run(
            "expressions/add_exactly",
            {
                "x": read_only(x), "places": read_only(places),
                "words": words, "rounded": rounded, "count": x.size,
                "sums": SUMS, "round": step,
            },
            backend, constants=constants, blocks=2, seed=seed,
        )  # fmt: skip
    return rounded


def exact(x):
    """The sum of floats, rounded once."""
    if not np.isfinite(x).all():
        return x.dtype.type(np.sum(x.astype(np.float64)))
    total = sum(map(Fraction, x.tolist()), Fraction(0))
    return x.dtype.type(float(total))


def floats(width):
    return st.floats(width=width, allow_nan=False, allow_infinity=False)


@on_both
@pytest.mark.parametrize("width", [32, 64])
@given(data=st.data(), seed=st.integers(0, 9))
def test_a_sum_is_rounded_once(backend, width, data, seed):
    drawn = data.draw(st.lists(floats(width), max_size=60))
    x = np.array([*drawn, *(-y for y in drawn[::2]), 0.0], f"float{width}")
    places = (np.arange(x.size) * 5 % SUMS).astype(np.int32)
    found = summed(x, places, backend, seed)
    with np.errstate(over="ignore"):
        try:
            want = np.array([exact(x[places == i]) for i in range(SUMS)])
        except OverflowError:  # of a double
            assume(False)
    if width == 32:
        assert_arrays_equal(found, want.astype(np.float32), "sums")
    else:  # the first digits are rounded twice
        bound = 2.0**-52 * np.abs(want) + 2.0**-1074
        assert not np.any((found != want) & (np.abs(found - want) > bound))


@on_both
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinities(backend, dtype):
    inf, nan = math.inf, math.nan
    x = np.array([inf, 1, -inf, -2, nan, inf, -inf, inf, inf, -0.0], dtype)
    places = np.array([0, 0, 1, 1, 2, 3, 3, 4, 4, 5], np.int32)
    found = summed(x, places, backend)
    assert_arrays_equal(found, np.array(
        [inf, -inf, nan, nan, inf, 0, 0], dtype), "sums")  # fmt: skip
