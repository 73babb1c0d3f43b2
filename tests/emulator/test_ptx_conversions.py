"""Conversions of ptx.cuh, to the bit: to_float, pack, halves of a pair."""

import numpy as np
import pytest
from hypothesis import given

from helpers.bits import (
    SEEDS,
    any_floats,
    around_ties,
    assert_same_floats,
    bits_of,
    every_element,
)
from helpers.compare import assert_arrays_equal
from helpers.dtypes import DTYPES
from helpers.small_kernels import on_both, read_only, run

CANONICAL_NAN = 0x7FFF

of_each_type = pytest.mark.parametrize("name", ["float16", "bfloat16"])


def packed(low, high, name, backend):
    """Pack pairs of float32; the elements' bits as (pairs, 2)."""
    pair = np.empty(low.shape, np.uint32)
    run(
        "primitives/pack_pairs",
        {"low": read_only(low), "high": read_only(high), "pair": pair},
        backend,
        constants={"Element": name},
        threads=128,
        blocks=pair.size // 128,
    )
    return pair.view(np.uint16).reshape(-1, 2)


def rounded(x, name):
    """The bits of float32 numbers, rounded to nearest even by NumPy."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = bits_of(x.astype(DTYPES[name]))
    return np.where(np.isnan(x), CANONICAL_NAN, bits)


@on_both
@of_each_type
def test_every_element_as_a_float(name, backend):
    """Exact; the manual does not specify which NaN results from NaN."""
    x = every_element(DTYPES[name])
    y = np.empty(x.shape, np.float32)
    run(
        "primitives/widen",
        {"x": read_only(bits_of(x)), "y": y},
        backend,
        constants={"Element": name},
        threads=256,
        blocks=256,
    )
    with np.errstate(invalid="ignore"):  # signalling NaN
        assert_same_floats(y, x.astype(np.float32))


@on_both
@of_each_type
def test_packing_rounds_to_nearest_even(name, backend):
    """At and next to every tie: normal, subnormal, at overflow."""
    low, high = around_ties(DTYPES[name]).reshape(2, -1)
    got = packed(low, high, name, backend)
    assert_arrays_equal(got[:, 0], rounded(low, name), "got[:, 0]")
    assert_arrays_equal(got[:, 1], rounded(high, name), "got[:, 1]")


@on_both
@of_each_type
@given(seed=SEEDS)
def test_packing_any_floats(name, backend, seed):
    """Including NaN of any payload, which becomes one NaN."""
    low, high = any_floats(seed, (2, 256))
    got = packed(low, high, name, backend)
    assert_arrays_equal(got[:, 0], rounded(low, name), "got[:, 0]")
    assert_arrays_equal(got[:, 1], rounded(high, name), "got[:, 1]")


@on_both
@of_each_type
@given(seed=SEEDS)
def test_the_halves_of_a_pair(name, backend, seed):
    pair = np.random.default_rng(seed).integers(0, 2**32, 64, np.uint32)
    halves = np.empty((2, 64), np.uint16)
    run(
        "primitives/unpack_pairs",
        {"pair": read_only(pair), "low": halves[0], "high": halves[1]},
        backend,
        constants={"Element": name},
        threads=64,
    )
    assert_arrays_equal(halves[0], pair & 0xFFFF, "halves[0]")
    assert_arrays_equal(halves[1], pair >> 16, "halves[1]")
