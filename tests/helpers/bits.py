"""Floats chosen and compared by their bits."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from .compare import assert_arrays_equal

SEEDS = st.integers(0, 2**32 - 1)


def bits_of(array):
    """View an array's floats as unsigned integers."""
    return array.view(f"u{array.itemsize}")


def every_element(dtype):
    """Return all 65536 values of a 16-bit type, in the order of bits."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@np.errstate(invalid="ignore")  # signalling NaN
def finite_elements(dtype):
    """Return the values that are neither NaN nor infinite."""
    elements = every_element(dtype)
    return elements[np.isfinite(elements)]


@np.errstate(invalid="ignore")
def denormals(dtype):
    """Return the values with the smallest exponent, including zeros."""
    elements = every_element(dtype)
    least = ml_dtypes.finfo(dtype).smallest_normal
    return elements[np.abs(elements) < least]


def around_ties(dtype):
    """Return every float32 at which rounding to a 16-bit type changes.

    Each finite element, the middle between it and the next (after the last
    comes what that would be with a larger exponent), and the float32 before
    and after the middle; of both signs.
    """
    finite = finite_elements(dtype).astype(np.float64)
    finite = np.split(finite, 2)[0]  # the second half is negative
    last = finite[-1] + (finite[-1] - finite[-2])
    middle = ((finite + np.append(finite[1:], last)) / 2).astype(np.float32)
    found = np.concatenate([
        finite.astype(np.float32),
        middle,
        np.nextafter(middle, np.float32(0)),
        np.nextafter(middle, np.float32(np.inf)),
    ])  # fmt: skip
    return np.concatenate([found, -found])


def any_floats(seed, shape, dtype=np.float32):
    """Draw from all bit patterns; a quarter are of those in `special`."""
    rng = np.random.default_rng(seed)
    itemsize = np.dtype(dtype).itemsize
    drawn = np.frombuffer(rng.bytes(int(np.prod(shape)) * itemsize), dtype)
    drawn = drawn.reshape(shape)
    chosen = rng.choice(special(dtype), shape)
    return np.where(rng.integers(0, 4, shape) == 0, chosen, drawn)


def special(dtype):
    """Return zeros, the ends of the denormals and normals, inf and NaN."""
    info = np.finfo(dtype)
    normal, least = info.smallest_normal, info.smallest_subnormal
    positive = [0, least, normal - least, normal, 1, info.max, np.inf, np.nan]
    found = np.array(positive, dtype)
    return np.concatenate([found, -found])


def assert_same_floats(got, expected, name=""):
    """Assert equal bits; all NaNs count as equal."""
    nan = np.isnan(expected)
    assert_arrays_equal(np.isnan(got), nan, "np.isnan(got)", f"{name}: NaN")
    assert_arrays_equal(
        bits_of(got)[~nan], bits_of(expected)[~nan], "bits_of(got)[~nan]", name
    )
