"""Loads and stores of shared memory in common/ptx.cuh, to the bit."""

import numpy as np
import pytest
from hypothesis import given

from helpers.bits import SEEDS, any_floats
from helpers.compare import assert_arrays_equal
from helpers.small_kernels import on_both, read_only, run


@on_both
@pytest.mark.parametrize("transposed", [False, True])
@given(seed=SEEDS)
def test_ldmatrix_hands_out_the_elements(transposed, backend, seed):
    """Lane l gets the l-th pair of elements of each matrix."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 32, 32, np.int32)
    elements = rng.integers(0, 2**16, (32, 8), np.uint16)
    out = np.empty((32, 4), np.uint32)
    run(
        "primitives/load_matrices",
        {"words": read_only(elements), "rows": read_only(rows), "out": out},
        backend,
        constants={"TRANSPOSED": transposed},
        shared_bytes=512,
    )
    matrices = elements[rows].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1).copy()
    pairs = matrices.view(np.uint32).reshape(4, 32)
    assert_arrays_equal(out, pairs.T, "out")


@on_both
@given(seed=SEEDS)
def test_movmatrix_transposes(backend, seed):
    """Lane l has the l-th pair of elements, row by row."""
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 2**16, (8, 8), np.uint16)
    out = np.empty((8, 4), np.uint32)
    arguments = {"pairs": read_only(matrix.view(np.uint32)), "out": out}
    run("primitives/transpose_matrix", arguments, backend)
    assert_arrays_equal(out.view(np.uint16), matrix.T, "out.view(np.uint16)")


@on_both
@given(seed=SEEDS)
def test_stores_and_loads_of_shared_memory(backend, seed):
    """Words that are NaN as floats keep their bits."""
    rng = np.random.default_rng(seed)
    words = any_floats(seed, (64, 4)).view(np.uint32)
    to = rng.permutation(64).astype(np.int32)
    chunks, floats = np.empty((2, 64, 4), np.uint32)
    address = np.empty(64, np.uint32)
    run(
        "primitives/move_shared",
        {"words": read_only(words), "to": read_only(to), "chunks": chunks,
         "floats": floats, "address": address},
        backend,
        threads=64,
        shared_bytes=64 * 16,
    )  # fmt: skip
    assert_arrays_equal(chunks[to], words, "chunks[to]")
    assert_arrays_equal(floats[to], words, "floats[to]")
    assert_arrays_equal(address, np.arange(64), "address")
