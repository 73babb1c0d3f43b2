"""mma_16x8x8 of tf32: exact where it must be, else bounded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import SEEDS, bits_of
from helpers.compare import assert_all, assert_arrays_equal, assert_at_most
from helpers.small_kernels import on_both, on_hopper, read_only, run

SEEN = np.uint32(0xFFFFE000)  # what tf32 has of a float's bits
SMALLEST_NORMAL = 2.0**-126


def multiplied(a, b, c, backend, **options):
    """Return a @ b + c of (n, 16, 8), (n, 8, 8) and (n, 16, 8) arrays."""
    d = np.empty(c.shape, np.float32)
    run(
        "primitives/multiply_tf32",
        {"a": read_only(bits_of(a)), "b": read_only(bits_of(b)),
         "c": read_only(c), "d": d},
        backend,
        blocks=len(c),
        **options,
    )  # fmt: skip
    return d


def tiles(draw, n=4):
    """Draw a, b and c, each by draw(shape), a and b cut to tf32."""
    a, b, c = (
        draw(x).astype(np.float32) for x in ((n, 16, 8), (n, 8, 8), (n, 16, 8))
    )
    return cut(a), cut(b), c


def cut(array):
    return (bits_of(array) & SEEN).view(np.float32)


@on_both
@given(seed=SEEDS)
def test_small_integers_are_exact(backend, seed):
    """Integers of 11 bits; every partial sum is one below 2^24."""
    rng = np.random.default_rng(seed)
    a, b, c = tiles(lambda shape: rng.integers(-1023, 1024, shape))
    assert_arrays_equal(multiplied(a, b, c, backend), a @ b + c, "multiplied")


@on_both
@given(seed=SEEDS)
def test_the_lower_bits_are_not_looked_at(backend, seed):
    rng = np.random.default_rng(seed)
    a, b, c = tiles(rng.standard_normal)
    more = [
        (bits_of(x) | rng.integers(0, 1 << 13, x.shape, np.uint32))
        for x in (a, b)
    ]
    got = multiplied(*(x.view(np.float32) for x in more), c, backend)
    assert_arrays_equal(got, multiplied(a, b, c, backend), "got")


@on_both
@given(seed=SEEDS, spread=st.integers(0, 12))
def test_sums_are_right_to_their_bound(backend, seed, spread):
    """As those of 16-bit types (test_ptx_arithmetic), of 8 products."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        exponents = rng.integers(-spread, spread + 1, shape)
        return rng.standard_normal(shape) * 2.0**exponents

    a, b, c = tiles(draw)
    d = multiplied(a, b, c, backend)
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    error = np.abs(d - (a @ b + c))
    assert_at_most(error, 16 * (2.0**-23 * size + SMALLEST_NORMAL), "error")


@on_both
@given(seed=SEEDS, share=st.sampled_from([0.01, 0.1, 0.5]))
def test_infinities_and_nan(backend, seed, share):
    """inf 0 and inf - inf are NaN, all else follows."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        strange = rng.choice([np.inf, -np.inf, np.nan, 0], shape)
        ordinary = rng.integers(-4, 5, shape)
        return np.where(rng.random(shape) < share, strange, ordinary)

    a, b, c = tiles(draw)
    d = multiplied(a, b, c, backend)
    with np.errstate(invalid="ignore"):
        expected = (a[..., None] * b[:, None]).sum(axis=2) + c
    assert_arrays_equal(d, expected, "d")


# What one MMA adds to 2^13, in units of the last bit there, if each of eight
# products is so many; measured on an H100.
TRUNCATED = [(0.125, 0), (0.25, 2), (0.4375, 2), (-0.4375, -2), (1.24, 8)]


@on_hopper
@pytest.mark.parametrize(("product", "added"), TRUNCATED)
def test_sums_are_truncated(product, added, backend):
    """As those of 16-bit types: products below a quarter, the sum below 1."""
    unit = 2.0**-10
    a = cut(np.full((1, 16, 8), product * unit, np.float32))
    b, c = np.ones((1, 8, 8), np.float32), np.full((1, 16, 8), 2.0**13)
    d = multiplied(a, b, c.astype(np.float32), backend, truncates=True)
    assert_all((d - 2.0**13) / unit, added, "d")
