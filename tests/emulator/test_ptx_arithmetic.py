"""Powers of two, reciprocals, maxima, mma_16x8x16: exact where they must be.

Else they are bounded.
"""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import (
    SEEDS,
    any_floats,
    assert_same_floats,
    bits_of,
    denormals,
    finite_elements,
)
from helpers.compare import assert_arrays_equal, assert_at_most
from helpers.dtypes import DTYPES
from helpers.host_compiler import needs_compiler
from helpers.small_kernels import on_both, on_hopper, read_only, run

SMALLEST_NORMAL = 2.0**-126
# PTX ISA, "ex2": the largest relative error of ex2.approx.ftz.f32.
EXP2_ERROR = 2.0**-22

of_each_type = pytest.mark.parametrize("name", ["float16", "bfloat16"])


# The same, "rcp", of rcp.approx.ftz.f32: 1 ulp.
RECIPROCAL_ERROR = 2.0**-23


def per_number(x, backend, kernel="powers_of_two"):
    y = np.empty(x.shape, np.float32)
    run(
        f"primitives/{kernel}",
        {"x": read_only(x), "y": y},
        backend,
        threads=32,
        blocks=x.size // 32,
    )
    return y


def multiplied(a, b, c, backend, **options):
    """Return a @ b + c of (n, 16, 16), (n, 16, 8) and (n, 16, 8) arrays."""
    d = np.empty(c.shape, np.float32)
    run(
        "primitives/multiply_tiles",
        {"a": read_only(bits_of(a)), "b": read_only(bits_of(b)),
         "c": read_only(c), "d": d},
        backend,
        constants={"Element": a.dtype.name},
        blocks=len(c),
        **options,
    )  # fmt: skip
    return d


def random_tiles(rng, dtype, draw, n=4):
    """Draw a and b, rounded to a dtype, and a float32 c by draw(shape)."""
    shapes = (n, 16, 16), (n, 16, 8), (n, 16, 8)
    dtypes = dtype, dtype, np.float32
    return (draw(x).astype(t) for x, t in zip(shapes, dtypes, strict=True))


@on_both
def test_exp2_of_special_numbers(backend):
    """The table of PTX ISA, "ex2"; the softmax needs 2^0 = 1 exactly."""
    denormals = [2.0**-149, 2.0**-127, -(2.0**-149), -(2.0**-127)]
    x = np.array([0, -0.0, *denormals, -np.inf, np.inf, np.nan], np.float32)
    x = np.resize(x, 32)
    expected = np.resize(
        np.array([1] * 6 + [0, np.inf, np.nan], np.float32), 32
    )
    assert_same_floats(per_number(x, backend), expected)


@on_both
def test_reciprocals_of_special_numbers(backend):
    """The table of PTX ISA, "rcp"."""
    x = np.array([-np.inf, -(2.0**-130), -0.0, 0, 2.0**-130, np.inf, np.nan])
    expected = np.array([-0.0, -np.inf, -np.inf, np.inf, np.inf, 0, np.nan])
    x, expected = (np.resize(a, 32).astype(np.float32) for a in (x, expected))
    assert_same_floats(per_number(x, backend, "reciprocals"), expected)


@on_both
@given(seed=SEEDS)
def test_reciprocals_are_right_to_their_bound(backend, seed):
    rng = np.random.default_rng(seed)
    x = (10 ** rng.uniform(-37, 37, 32)).astype(np.float32)
    got = per_number(x, backend, "reciprocals").astype(np.float64)
    assert_at_most(
        np.abs(got * x - 1), RECIPROCAL_ERROR, "np.abs(got * x - 1)"
    )


def quotients(a, b, backend):
    y = np.empty(a.shape, np.float32)
    given = {"a": read_only(a), "b": read_only(b), "y": y}
    blocks = a.size // 32
    run("primitives/quotients", given, backend, threads=32, blocks=blocks)
    return y


@on_both
@given(seed=SEEDS)
@np.errstate(all="ignore")
def test_quotients_are_right_to_their_bound(backend, seed):
    """PTX ISA, "div.full": 2 ulp, subnormal and large divisors too."""
    rng = np.random.default_rng(seed)
    b = np.ldexp(rng.uniform(1, 2, 64), rng.integers(-149, 128, 64))
    b = b.astype(np.float32)
    a = (b * 2.0 ** rng.uniform(-3, 3, 64)).astype(np.float32)
    a = np.where(np.isfinite(a), a, np.float32(1))
    want = a.astype(np.float64) / b
    ulp = 2.0 ** np.maximum(np.floor(np.log2(want)) - 23, -149)
    error = np.abs(quotients(a, b, backend) - want)
    assert_at_most(error, 2 * ulp, "error")


@on_both
@np.errstate(all="ignore")
def test_quotients_of_special_numbers(backend):
    a, b = np.meshgrid(*[np.array([0, 1, 2.0**-140, np.inf], np.float32)] * 2)
    a, b = np.resize(a, 32), np.resize(b, 32) * np.repeat([1, -1], 16)
    b = b.astype(np.float32)
    assert_same_floats(quotients(a, b, backend), a / b)


@on_both
@given(seed=SEEDS)
def test_maxima_of_upper_halves(backend, seed):
    """NaN and numbers of 2^121 and more compare above all others."""
    rng = np.random.default_rng(seed)
    m = rng.integers(0, 0x7C00, 32, np.uint32) << 16
    m[:3] = 0, 0x7FFF << 16, 0xFC00 << 16
    a, b = rng.integers(0, 2**32, (2, 32), np.uint32)
    a[2:4] = 0x7F800000, 0xFF800000
    b[4:8] = np.array([np.nan, -np.nan, 2.0**121, -1.5], np.float32).view("u4")
    a[6:8], m[6:8] = 0xBF800000, 0xFC00 << 16
    found = {x: np.empty(32, np.uint32) for x in ("y", "of_sizes")}
    numbers = (read_only(x.view(np.float32)) for x in (a, b))
    given = dict(zip("mab", (read_only(m), *numbers), strict=True))
    run(
        "primitives/upper_halves", {**given, **found}, backend,
        threads=32, blocks=1,
    )  # fmt: skip
    for name, kept in (("y", 0xFFFF), ("of_sizes", 0x7FFF)):
        halves = [m >> 16, *(x >> 16 & kept for x in (a, b))]
        largest = reduce(larger_half, halves)
        assert_arrays_equal(found[name] >> 16, largest, "found[name] >> 16")


@on_both
def test_products_of_pairs(backend):
    """Rounded once to nearest even; subnormal numbers are kept."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**32, (2, 32), np.uint32)
    products = np.empty(32, np.uint32)
    given = {"a": read_only(a), "b": read_only(b), "products": products}
    run("primitives/float16_products", given, backend)
    x, y, z = (u.view(np.float16) for u in (a, b, products))
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) * y.astype(np.float64)).astype(x.dtype)
    assert_arrays_equal(np.isnan(z), np.isnan(want), "np.isnan(z)")
    known = ~np.isnan(want)
    assert_arrays_equal(z[known], want[known], "z[known]")


def larger_half(a, b):
    """The larger of two halves, compared as float16; NaN is above all."""
    a, b = (x.astype(np.uint16).view(np.float16) for x in (a, b))
    nan = np.isnan(a) | np.isnan(b)
    larger = np.where(b > a, b, a).view(np.uint16)
    return np.where(nan, 0x7FFF, larger).astype(np.uint32)


@on_both
@given(seed=SEEDS)
@np.errstate(all="ignore")
def test_exp2_is_right_to_its_bound(backend, seed):
    """Results below the normal numbers, or within the bound of that, are 0.

    Likewise infinity from the bound below 2^128 on.
    """
    drawn = np.random.default_rng(seed).uniform(-160, 140, 480)
    x = np.append(drawn.astype(np.float32), any_floats(seed, 32))
    x[:4] = [-126, np.nextafter(np.float32(-126), np.float32(-127)), 127, 128]
    y = per_number(x, backend).astype(np.float64)
    expected = np.exp2(x.astype(np.float64))
    close = np.abs(y - expected) <= EXP2_ERROR * expected
    close &= y >= SMALLEST_NORMAL
    flushed = (y == 0) & (expected < SMALLEST_NORMAL * (1 + EXP2_ERROR))
    infinite = (y == np.inf) & (expected > 2.0**128 * (1 - EXP2_ERROR))
    right = close | flushed | infinite | (np.isnan(x) & np.isnan(y))
    assert_arrays_equal(x[~right], [], "x[~right]")


@on_both
@of_each_type
@given(seed=SEEDS)
def test_mma_of_small_integers_is_exact(name, backend, seed):
    """Every partial sum is an integer below 2^24, so any order is exact."""
    rng = np.random.default_rng(seed)
    a, b, c = random_tiles(
        rng, DTYPES[name], lambda shape: rng.integers(-128, 129, shape)
    )
    d = multiplied(a, b, c, backend)
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    assert_arrays_equal(d, expected, "d")


@needs_compiler
def test_an_mma_of_sm_75_adds_eight_products_and_then_eight():
    """The last bit of 2^24 is 2: ones are lost unless they come together."""
    a = np.zeros((1, 16, 16), np.float16)
    a[:, :, [0, 8]] = 1.0
    b, c = np.ones((1, 16, 8), np.float16), np.full((1, 16, 8), 2.0**24)
    d = [
        multiplied(a, b, c.astype(np.float32), "emulated", arch=arch) - 2**24
        for arch in ("sm_75", "sm_80")
    ]
    assert_arrays_equal(d[0], np.zeros(c.shape), "sm_75")
    assert_arrays_equal(d[1], np.full(c.shape, 2.0), "sm_80")


@on_both
@of_each_type
@given(seed=SEEDS, spread=st.integers(0, 12))
def test_mma_is_right_to_its_bound(name, backend, seed, spread):
    """The manual leaves the order and the rounding of the sums open.

    Each of 16 products is added to the sum, one after the other at worst,
    or is aligned with others: one truncation of the product and one of the
    sum, each of a number below S = sum |a b| + |c|, to 24 bits at least.
    So 2^-23 S is lost at most 32 times. What is less than 2^-126 may be
    flushed, likewise.
    """
    rng = np.random.default_rng(seed)

    def draw(shape):
        exponents = rng.integers(-spread, spread + 1, shape)
        return rng.standard_normal(shape) * 2.0**exponents

    a, b, c = random_tiles(rng, DTYPES[name], draw)
    d = multiplied(a, b, c, backend)
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    error = np.abs(d - (a @ b + c))
    assert_at_most(error, 32 * (2.0**-23 * size + SMALLEST_NORMAL), "error")


@on_both
@of_each_type
@given(seed=SEEDS)
@np.errstate(over="ignore")
def test_mma_with_one_product_a_sum_is_exact(name, backend, seed):
    """Elements of every kind, denormals too, times 2^8.

    The manual leaves denormal elements open; tensor cores have taken them
    in full wherever it was measured (Fasi et al. 2021,
    doi:10.7717/peerj-cs.330).
    """
    rng = np.random.default_rng(seed)
    a, b, c = random_tiles(rng, DTYPES[name], np.zeros, n=2)
    a[:] = rng.choice(finite_elements(DTYPES[name]), a.shape)
    a[:, :4] = rng.choice(denormals(DTYPES[name]), (2, 4, 16))
    steps = rng.integers(0, 16, 8)
    b[:, steps, np.arange(8)] = 2.0**8
    d = multiplied(a, b, c, backend)
    expected = a[:, :, steps].astype(np.float32) * np.float32(2.0**8)
    finite = np.isfinite(expected)
    assert_arrays_equal(d[finite], expected[finite], "d[finite]")


@on_both
@of_each_type
@given(seed=SEEDS)
def test_mma_with_products_of_zero_leaves_the_sum(name, backend, seed):
    """A sum that is not denormal, that is: such may be flushed."""
    a, b, c = random_tiles(None, DTYPES[name], np.zeros, n=2)
    c[:] = any_floats(seed, c.shape)
    c[np.abs(c) < SMALLEST_NORMAL] = 0
    assert_arrays_equal(multiplied(a, b, c, backend), c, "multiplied")


@on_both
@of_each_type
@given(seed=SEEDS, share=st.sampled_from([0.01, 0.1, 0.5]))
def test_mma_with_infinities_and_nan(name, backend, seed, share):
    """inf 0 and inf - inf are NaN, all else follows; no sum overflows."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        strange = rng.choice([np.inf, -np.inf, np.nan, 0], shape)
        ordinary = rng.integers(-4, 5, shape)
        return np.where(rng.random(shape) < share, strange, ordinary)

    a, b, c = random_tiles(rng, DTYPES[name], draw)
    d = multiplied(a, b, c, backend)
    with np.errstate(invalid="ignore"):
        a, b = a.astype(np.float32), b.astype(np.float32)
        products = a[..., None] * b[:, None]  # n, rows, 16, columns
        expected = products.sum(axis=2) + c
    assert_arrays_equal(d, expected, "d")


# What one MMA adds to 2^13 and the products, in units of the last bit there;
# measured on an H200. Below 2^13 that bit is half as large.
TRUNCATED = [
    (0.0, [0.75]),
    (-0.5, [-0.25]),
    (1.0, [0.25, 0, 0, 0] * 4),
    (0.0, [0.125] * 16),
    (4.0, [0.4375] * 16),
    (-4.0, [-0.4375] * 16),
]


@on_hopper
@pytest.mark.parametrize(("added", "products"), TRUNCATED)
def test_sums_are_truncated(added, products, backend):
    """Products lose what is below a quarter, the sum what is below 1."""
    unit, a = 2.0**-10, np.zeros((1, 16, 16), np.float16)
    a[:, :, : len(products)] = np.multiply(products, unit)
    b, c = np.ones((1, 16, 8), np.float16), np.full((1, 16, 8), 2.0**13)
    d = multiplied(a, b, c.astype(np.float32), backend, truncates=True)
    assert_arrays_equal((d - 2.0**13) / unit, added, "(d - 2.0**13) / unit")
