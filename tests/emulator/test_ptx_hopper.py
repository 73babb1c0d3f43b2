"""Hopper's instructions in common/ptx.cuh, to the bit.

What the TMA unit does is in emulator/test_ptx_boxes.py.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import SEEDS, bits_of
from helpers.compare import assert_arrays_equal
from helpers.dtypes import DTYPES
from helpers.small_kernels import on_hopper, read_only, run


def drawn_words(seed, shape):
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


@on_hopper
@given(seed=SEEDS, rounds=st.integers(1, 5))
def test_warps_wait_for_the_phases_of_barriers(backend, seed, rounds):
    x = drawn_words(seed, 32)
    y, expected = np.empty_like(x), x
    run(
        "primitives/pass_on",
        {"x": read_only(x), "y": y, "rounds": rounds},
        backend,
        threads=128,
        shared_bytes=256,
        seed=seed,
    )
    for step in range(rounds * 4):
        expected = expected * 3 + step % 4
    assert_arrays_equal(y, expected, "y")


@on_hopper
@given(seed=SEEDS)
def test_copies_arrive(backend, seed):
    """A lane of the other warp reads what the opposite lane has copied."""
    chunks = drawn_words(seed, 64 * 4).reshape(64, 4)
    out = np.empty_like(chunks)
    run(
        "primitives/copies_arrive",
        {"chunks": read_only(chunks), "out": out},
        backend,
        threads=64,
        shared_bytes=1088,
        seed=seed,
    )
    assert_arrays_equal(out, chunks, "out")


@on_hopper
@given(seed=SEEDS)
def test_pairs_of_warps_meet(backend, seed):
    x = drawn_words(seed, (2, 2, 32))
    y = np.empty_like(x)
    run(
        "primitives/meet_in_pairs",
        {"x": read_only(x), "y": y},
        backend,
        threads=128,
        shared_bytes=512,
        seed=seed,
    )
    assert_arrays_equal(y, x[:, ::-1], "y")


@on_hopper
@pytest.mark.parametrize(
    ("threads", "blocks_per_sm", "more"), [(384, 1, 240), (256, 3, 136)]
)
def test_threads_keep_their_values_across_setmaxnreg(
    threads, blocks_per_sm, more, backend
):
    x = drawn_words(0, threads)
    y = np.empty_like(x)
    run(
        "primitives/trade_registers",
        {"x": read_only(x), "y": y},
        backend,
        constants={"NUM_THREADS": threads, "BLOCKS_PER_SM": blocks_per_sm,
                   "FEWER": 24, "MORE": more},
        threads=threads,
    )  # fmt: skip
    assert_arrays_equal(y, x, "y")


@on_hopper
@given(seed=SEEDS)
def test_stmatrix_stores_the_elements(backend, seed):
    """The inverse of ldmatrix: lane l has pair l of each matrix."""
    rng = np.random.default_rng(seed)
    matrices = drawn_words(seed, (4, 8, 4))
    rows = rng.permutation(32).astype(np.int32)
    elements = rng.integers(0, 2**16, 32, np.uint16)
    out = np.empty(144, np.uint32)
    run(
        "primitives/store_matrices",
        {"r": read_only(matrices.reshape(4, 32).T.copy()),
         "rows": read_only(rows), "elements": read_only(elements),
         "out": out},
        backend,
        shared_bytes=576,
    )  # fmt: skip
    stored = out[:128].reshape(32, 4)[rows]
    assert_arrays_equal(stored, matrices.reshape(32, 4), "stored")
    assert_arrays_equal(out[128:].view(np.uint16), elements, "out")


@on_hopper
@given(seed=SEEDS, chunks=st.integers(1, 5), rounds=st.integers(1, 3))
def test_bytes_are_copied_and_floats_added(backend, seed, chunks, rounds):
    """Small integers: every order of the additions is exact."""
    rng = np.random.default_rng(seed)
    x, sums = rng.integers(-99, 100, (2, chunks * 4)).astype(np.float32)
    expected = sums + 3 * rounds * x
    own, seen = np.empty((2, 3, x.size), np.float32)
    run(
        "primitives/add_in_bulk",
        {"x": read_only(x), "sums": sums, "own": own, "seen": seen,
         "bytes": x.nbytes, "rounds": rounds},
        backend,
        blocks=3,
        shared_bytes=256,
        seed=seed,
    )  # fmt: skip
    assert_arrays_equal(seen, np.tile(2 * x, (3, 1)), "seen")
    assert_arrays_equal(sums, expected, "sums")


LARGEST, SMALLEST = 2**31 - 1, -(2**31)


@on_hopper
@given(seed=SEEDS, rounds=st.integers(1, 3))
def test_integers_are_rounded_and_added(backend, seed, rounds):
    """Halves to even, NaN to 0, the rest to what is there; sums wrap."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(-(2**26), 2**26, 32) / 4).astype(np.float32)
    x[:6] = 0.5, 1.5, np.nan, 3e9, -np.inf, -2.5
    whole = np.rint(np.nan_to_num(x[6:])).astype(np.int64)
    whole = np.r_[0, 2, 0, LARGEST, SMALLEST, -2, whole]
    sums = rng.integers(SMALLEST, LARGEST, 32, np.int32)
    others = sums.copy()
    expected = (sums + 3 * rounds * whole).astype(np.int32)
    run(
        "primitives/add_integers",
        {"x": read_only(x), "sums": sums, "others": others, "rounds": rounds},
        backend,
        blocks=3,
        shared_bytes=128,
        seed=seed,
    )
    assert_arrays_equal(sums, expected, "sums")
    assert_arrays_equal(others, expected, "others")


@on_hopper
@given(seed=SEEDS, waits=st.integers(0, 1))
def test_a_sum_is_there_after_the_wait_for_it(backend, seed, waits):
    """The wait for its source (.read) does not suffice."""
    x, sums = np.ones(4, np.float32), np.zeros(4, np.float32)
    seen = np.empty_like(x)
    run(
        "primitives/add_and_look",
        {"x": read_only(x), "sums": sums, "seen": seen, "wait": waits},
        backend,
        shared_bytes=64,
        seed=seed,
    )
    if waits or backend == "emulated":
        assert_arrays_equal(seen, x * waits, "seen")
    assert_arrays_equal(sums, x, "sums")


def check_wgmma(backend, name, columns, sign=1, **how):
    """Every partial sum is an integer below 2^24, so any order is exact."""
    rng = np.random.default_rng(columns)
    a = rng.integers(-128, 129, (64, 16)).astype(DTYPES[name])
    b = rng.integers(-128, 129, (16, columns)).astype(DTYPES[name])
    c = rng.integers(-128, 129, (64, columns)).astype(np.float32)
    product = sign * (a.astype(np.float32) @ b.astype(np.float32))
    for accumulate in (0, 1):
        d = np.empty_like(c)
        run(
            "primitives/multiply_warpgroup",
            {"a": read_only(bits_of(a)), "b": read_only(bits_of(b)),
             "c": read_only(c), "d": d, "accumulate": accumulate},
            backend,
            constants={"Element": name, "COLUMNS": columns, "SIGN": sign,
                       "REGISTERS": False, "A_TRANSPOSED": False,
                       "B_TRANSPOSED": False, **how},
            threads=128,
            shared_bytes=8192 + columns * 128,
        )  # fmt: skip
        assert_arrays_equal(d, product + accumulate * c, "d")


@on_hopper
@pytest.mark.parametrize(
    "columns", [32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256]
)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("registers", "sign"), [(True, 1), (False, 1), (False, -1)]
)
def test_wgmma_of_small_integers_is_exact(
    registers, sign, name, columns, backend
):
    how = {"REGISTERS": registers, "B_TRANSPOSED": registers}
    check_wgmma(backend, name, columns, sign, **how)


@on_hopper
@pytest.mark.parametrize("columns", [64, 80])
@pytest.mark.parametrize("sign", [1, -1])
def test_wgmma_of_scores_with_queries_in_registers(sign, columns, backend):
    check_wgmma(backend, "bfloat16", columns, sign, REGISTERS=True)


@on_hopper
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
@pytest.mark.parametrize(
    ("of_a", "of_b"), [(True, False), (False, True), (True, True)]
)
def test_wgmma_with_transposed_operands(of_a, of_b, columns, backend):
    how = {"A_TRANSPOSED": of_a, "B_TRANSPOSED": of_b}
    check_wgmma(backend, "float16", columns, **how)
