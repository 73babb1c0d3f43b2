"""CUDA's built-in functions and variables, as kernels use them."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import SEEDS, any_floats, assert_same_floats, bits_of
from helpers.compare import assert_all, assert_arrays_equal
from helpers.small_kernels import on_both, read_only, run

TYPES = {
    "int": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "float": np.float32,
    "double": np.float64,
}
# CUDA C++ Programming Guide, "Mathematical Functions": the largest error of
# expf; that of exp, log and logf is 1.
ULPS = 2

of_floats = pytest.mark.parametrize("name", ["float", "double"])


def per_thread(file, inputs, results, backend, **options):
    """Run a kernel that makes, by thread, results of inputs.

    Returns the results; all arrays are flat and of as many elements.
    """
    (size,) = {x.size for x in inputs}
    made = [np.empty(size, dtype) for dtype in results]
    arrays = [*map(read_only, inputs), *made]
    run(
        f"primitives/{file}",
        {f"array_{i}": x for i, x in enumerate(arrays)},
        backend,
        threads=64,
        blocks=size // 64,
        **options,
    )
    return made


# ---- Threads that work together ----


@on_both
@pytest.mark.parametrize("name", ["int", "i64", "float", "double"])
@given(seed=SEEDS, mask=st.integers(1, 2**32 - 1))
def test_shuffles_exchange_lanes(name, backend, seed, mask):
    """Between lanes of the mask; partners outside it have no value."""
    rng = np.random.default_rng(seed)
    x = any_floats(seed, 64, f"f{TYPES[name]().itemsize}").view(TYPES[name])
    distance = rng.integers(0, 32, 64, np.int32)
    y = np.zeros_like(x)
    run(
        "primitives/exchange_lanes",
        {"x": read_only(x), "distance": read_only(distance),
         "mask": read_only(np.array([mask], np.uint32)), "y": y},
        backend,
        constants={"T": name},
        threads=64,
    )  # fmt: skip
    lane = np.arange(64)
    partner = lane ^ distance
    takes_part = (mask >> (lane % 32) & 1).astype(bool)
    known = takes_part & takes_part[partner]
    got, expected = bits_of(y), bits_of(x[partner])
    assert_arrays_equal(got[known], expected[known], "got[known]")
    assert_all(got[~takes_part], 0, "got[~takes_part]")


@on_both
@given(SEEDS)
def test_extremes_of_a_warp(backend, seed):
    """redux_min and redux_max, negative ints included."""
    x = np.random.default_rng(seed).integers(
        -(2**31), 2**31, 64, np.int64
    ).astype(np.int32)  # fmt: skip
    least, most = per_thread(
        "warp_extremes", [x], [np.int32, np.int32], backend
    )
    warps = x.reshape(2, 32)
    assert_arrays_equal(least, warps.min(1).repeat(32), "least")
    assert_arrays_equal(most, warps.max(1).repeat(32), "most")


@on_both
@given(seed=SEEDS, share=st.sampled_from([0, 0.01, 0.1, 0.9]))
def test_a_block_hears_of_any_of_its_threads(backend, seed, share):
    """Any nonzero int is true, whichever bits are set."""
    rng = np.random.default_rng(seed)
    true = rng.choice([1, 256, -(2**31)], (2, 256))
    asked = np.where(rng.random((2, 256)) < share, true, 0).astype(np.int32)
    got = per_thread("ask_block", asked, [np.int32] * 2, backend, seed=seed)
    for answer, values in zip(got, asked, strict=True):
        any_of_block = values.reshape(4, 64).any(axis=1)
        assert_arrays_equal(answer, any_of_block.repeat(64), "answer")


@on_both
@pytest.mark.parametrize("warp", [False, True])
@given(seed=SEEDS)
def test_shared_memory_at_a_barrier(warp, backend, seed):
    x = any_floats(seed, 64).view(np.uint32)
    (y,) = per_thread(
        "reverse",
        [x],
        [np.uint32],
        backend,
        constants={"WARP": warp},
        shared_bytes=256,
        seed=seed,
    )
    groups = x.reshape(-1, 32 if warp else 64)
    assert_arrays_equal(y, groups[:, ::-1].ravel(), "y")


@on_both
def test_every_thread_of_every_block_runs(backend):
    out = np.full((5, 64, 4), np.nan, np.float32)
    run("primitives/coordinates", {"out": out}, backend, threads=64, blocks=5)
    thread, block = np.meshgrid(np.arange(64), np.arange(5))
    expected = np.stack([thread, block, thread * 0 + 64, thread * 0 + 5], -1)
    assert_arrays_equal(out, expected, "out")


# ---- Arithmetic ----


@on_both
@of_floats
@given(seed=SEEDS)
def test_rounded_products(name, backend, seed):
    """With c = a b rounded, a b - c is 0, or fused the product's error.

    That error is a number of the type: a b has twice its digits.
    """
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, 64)).astype(TYPES[name])
    c = a * b
    rounded, fused = per_thread(
        "products", [a, b, c], [a.dtype] * 2, backend, constants={"T": name}
    )
    exact = [
        float(Fraction(float(x)) * Fraction(float(y)) - Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert_arrays_equal(rounded, np.zeros(64), "rounded")
    assert_arrays_equal(fused, exact, "fused")


@on_both
@given(seed=SEEDS)
def test_bits_as_floats_and_back(backend, seed):
    bits = any_floats(seed, 64).view(np.uint32)
    got = per_thread("reinterpret", [bits], [np.uint32] * 4, backend)
    for result in got:
        assert_arrays_equal(result, bits, "result")


@on_both
@pytest.mark.parametrize("name", ["int", "u32", "i64"])
@given(seed=SEEDS)
def test_the_lesser_and_the_greater_integer(name, backend, seed):
    rng = np.random.default_rng(seed)
    info = np.iinfo(TYPES[name])
    a, b = rng.integers(info.min, info.max, (2, 64), info.dtype, endpoint=True)
    a[:32] = rng.choice([info.min, 0, 1, info.max, b[0]], 32)
    least, most = per_thread(
        "extrema", [a, b], [a.dtype] * 2, backend, constants={"T": name}
    )
    assert_arrays_equal(least, np.minimum(a, b), "least")
    assert_arrays_equal(most, np.maximum(a, b), "most")


@on_both
@of_floats
@given(seed=SEEDS)
def test_the_larger_number_and_magnitudes(name, backend, seed):
    """A maximum ignores quiet NaN; of 0 and -0 it may be either."""
    a, b = any_floats(seed, (2, 64), TYPES[name])
    a[np.isnan(a)] = b[np.isnan(b)] = np.nan
    most, magnitude = per_thread(
        "magnitudes", [a, b], [a.dtype] * 2, backend, constants={"T": name}
    )
    assert_arrays_equal(most, np.fmax(a, b), "most")
    assert_same_floats(magnitude, np.abs(a))


@on_both
@given(seed=SEEDS)
def test_lowest_bit_and_number_of_bits(backend, seed):
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, 64).astype(np.int32)
    words[:33] = [0, *np.uint32(1 << np.arange(32, dtype=np.int64)).view("i4")]
    kinds = [words.dtype] * 2
    lowest, count = per_thread("count_bits", [words], kinds, backend)
    bits = (words[:, None] >> np.arange(32)) & 1
    first = np.where(words == 0, 0, bits.argmax(axis=1) + 1)
    assert_arrays_equal(lowest, first, "lowest")
    assert_arrays_equal(count, bits.sum(axis=1), "count")


def ulps_off(got, exact):
    """Return the largest error, in ulps of the exact result."""
    spacing = np.spacing(np.abs(exact.astype(got.dtype)))
    error = np.abs(got.astype(exact.dtype) - exact)
    return np.nanmax(error / spacing)


@on_both
@of_floats
@given(seed=SEEDS)
@np.errstate(invalid="ignore")
def test_exponentials_and_logarithms(name, backend, seed):
    rng = np.random.default_rng(seed)
    size = 10 ** rng.uniform(-30, 1.9, 64)  # exp(10^1.9) is finite in float
    x = (rng.choice([-1, 1], 64) * size).astype(TYPES[name])
    x[0] = 1
    power, logarithm, of_float = per_thread(
        "logarithms", [x], [x.dtype] * 2 + [np.float32], backend,
        constants={"T": name},
    )  # fmt: skip
    wide = x.astype(np.longdouble)
    single = x.astype(np.float32).astype(np.longdouble)
    assert ulps_off(power, np.exp(wide)) <= ULPS
    assert ulps_off(logarithm, np.log(wide)) <= ULPS
    assert ulps_off(of_float, np.log(single)) <= ULPS
    assert_arrays_equal(np.isnan(logarithm), x < 0, "np.isnan(logarithm)")


@on_both
@given(seed=SEEDS)
def test_fast_reciprocals(backend, seed):
    """Their error: CUDA C++ Programming Guide, "Intrinsic Functions"."""
    rng = np.random.default_rng(seed)
    x = (10 ** rng.uniform(-30, 30, 64)).astype(np.float32)
    x[0] = 1
    (inverse,) = per_thread("fast_reciprocals", [x], [x.dtype], backend)
    assert ulps_off(inverse, 1 / x.astype(np.longdouble)) <= 2
    assert inverse[0] == 1


@on_both
@of_floats
@np.errstate(all="ignore")
def test_exponentials_and_logarithms_of_special_numbers(name, backend):
    special = [0, -0.0, np.inf, -np.inf, np.nan, 1]
    x = np.resize(np.array(special, TYPES[name]), 64)
    power, logarithm, of_float = per_thread(
        "logarithms", [x], [x.dtype] * 2 + [np.float32], backend,
        constants={"T": name},
    )  # fmt: skip
    assert_arrays_equal(power[x != 1], np.exp(x)[x != 1], "power[x != 1]")
    assert_arrays_equal(logarithm, np.log(x), "logarithm")
    assert_arrays_equal(of_float, np.log(x), "of_float")
