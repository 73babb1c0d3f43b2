"""Global memory that several threads or blocks write: sums, semaphores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import SEEDS, any_floats, assert_same_floats
from helpers.compare import assert_arrays_equal
from helpers.small_kernels import on_both, read_only, run

SMALLEST_NORMAL = 2.0**-126


def add_fours(x, to, sums, backend):
    run(
        "primitives/add_fours",
        {"x": read_only(x), "to": read_only(to), "sums": sums},
        backend,
        blocks=len(x) // 32,
    )


def flushed(x):
    """Flush subnormals to zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(0, x), x)


@on_both
@given(seed=SEEDS, places=st.integers(1, 40))
def test_sums_of_many_threads_are_complete(backend, seed, places):
    """Small integers: every order of the additions is exact."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-99, 100, (128, 4)).astype(np.float32)
    sums = rng.integers(-99, 100, (places, 4)).astype(np.float32)
    to = rng.integers(0, places, 128, np.int32)
    expected = sums.copy()
    np.add.at(expected, to, x)
    add_fours(x, to, sums, backend)
    assert_arrays_equal(sums, expected, "sums")


@on_both
@given(seed=SEEDS)
@np.errstate(all="ignore")
def test_one_addition_is_rounded_to_nearest_even(backend, seed):
    """PTX ISA, "red": denormals are flushed, "current implementation"."""
    x, sums = any_floats(seed, (2, 64, 4))
    to = np.random.default_rng(seed).permutation(64).astype(np.int32)
    exact = sums[to] + x
    of_zeros = flushed(flushed(sums[to]) + flushed(x)).astype(np.float32)
    add_fours(x, to, sums, backend)
    got = sums[to]
    kept = got.view(np.uint32) == exact.view(np.uint32)
    assert_same_floats(got, np.where(kept, exact, of_zeros))


@on_both
@given(seed=SEEDS, places=st.integers(1, 40))
def test_zeros_are_not_added(backend, seed, places):
    """Zeros access no memory; a NaN is added."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, 128).astype(np.float32)
    to = np.where(x == 0, 2**20, rng.integers(0, places, 128, np.int32))
    x[:2] = np.nan, -0.0
    to[:2] = 0, 2**20
    sums = rng.integers(-99, 100, places).astype(np.float32)
    expected = sums.copy()
    np.add.at(expected, to[x != 0], x[x != 0])
    run(
        "primitives/add_nonzero",
        {"x": read_only(x), "to": read_only(to.astype(np.int32)),
         "sums": sums},
        backend,
        blocks=4,
    )  # fmt: skip
    assert_arrays_equal(sums, expected, "sums")


@on_both
@pytest.mark.parametrize("kind", ["float", "double"])
@given(seed=SEEDS, places=st.integers(1, 40))
def test_atomic_additions_see_one_another(backend, kind, seed, places):
    """Adding ones to 0: the n-th addition returns n - 1."""
    to = np.random.default_rng(seed).integers(0, places, 96, np.int32)
    dtype = {"float": np.float32, "double": np.float64}[kind]
    ones, sums = np.ones(96, dtype), np.zeros(places, dtype)
    before = np.empty(96, dtype)
    run(
        "primitives/add_atomically",
        {"x": read_only(ones), "to": read_only(to), "sums": sums,
         "before": before},
        backend,
        constants={"T": kind},
        blocks=3,
    )  # fmt: skip
    assert_arrays_equal(sums, np.bincount(to, minlength=places), "sums")
    for place in range(places):
        found = np.sort(before[to == place])
        assert_arrays_equal(found, np.arange(len(found)), "found")


@on_both
@given(blocks=st.integers(1, 9), seed=SEEDS)
def test_a_block_sees_the_previous_blocks_writes(backend, blocks, seed):
    """One thread of a block waits; its other threads see the values."""
    values = np.arange(64, dtype=np.uint32)
    turns = np.zeros(2, np.int32)
    expected = values.copy()
    for block in range(blocks):
        expected = expected * 3 + block
    run(
        "primitives/take_turns",
        {"turns": turns, "values": values},
        backend,
        shared_bytes=4,
        threads=64,
        blocks=blocks,
        seed=seed,
    )
    assert turns.tolist() == [blocks, blocks]
    assert_arrays_equal(values, expected, "values")


@on_both
@given(seed=SEEDS)
def test_a_warp_that_waits_lets_the_block_s_others_run(backend, seed):
    """Otherwise two blocks might wait for each other for ever."""
    turns, warps = np.zeros(2, np.int32), np.zeros(6, np.int32)
    run(
        "primitives/warps_take_turns",
        {"turns": turns, "warps": warps},
        backend,
        shared_bytes=4,
        threads=96,
        blocks=2,
        seed=seed,
        resident=2,
    )
    assert_arrays_equal(warps, [2, 2, 1, 1, 0, 0], "warps")
