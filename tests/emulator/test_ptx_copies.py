"""Asynchronous copies of common/ptx.cuh: which bytes land, and when."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import SEEDS
from helpers.compare import assert_arrays_equal
from helpers.small_kernels import on_both, read_only, run

THREADS = 64


def drawn_bytes(rng, shape):
    return np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(
        shape
    )


def copied(file, source, start, sizes, backend, **constants):
    """Copy sizes[i] bytes of source[start[i]] by thread i; return them."""
    out = np.empty((THREADS, source.shape[1]), np.uint8)
    run(
        f"primitives/{file}",
        {"source": read_only(source), "from": read_only(start),
         "bytes": read_only(sizes), "out": out},
        backend,
        constants=constants,
        threads=THREADS,
        shared_bytes=out.size,
    )  # fmt: skip
    return out[::-1]  # each thread reads what the one opposite copied


def expected_copies(source, start, sizes):
    """The first bytes of each chunk, then zeros."""
    inside = np.arange(source.shape[1]) < sizes[:, None]
    return np.where(inside, source[np.where(sizes > 0, start, 0)], 0)


@on_both
@given(seed=SEEDS)
def test_whole_chunks(backend, seed):
    rng = np.random.default_rng(seed)
    source = drawn_bytes(rng, (40, 16))
    start = rng.integers(0, 40, THREADS, np.int32)
    sizes = np.full(THREADS, 16, np.int32)
    got = copied("copy_chunks", source, start, sizes, backend, PARTLY=False)
    assert_arrays_equal(got, source[start], "got")


@on_both
@pytest.mark.parametrize(
    ("file", "chunk", "allowed"),
    [("copy_chunks", 16, range(17)), ("copy_words", 4, (0, 4))],
)
@given(seed=SEEDS, nothing=st.floats(0, 1))
def test_bytes_not_read_become_zero(
    file, chunk, allowed, backend, seed, nothing
):
    """If nothing is read, the source address may be invalid."""
    rng = np.random.default_rng(seed)
    source = drawn_bytes(rng, (40, chunk))
    start = rng.integers(0, 40, THREADS, np.int32)
    sizes = rng.choice(allowed, THREADS).astype(np.int32)
    sizes[rng.random(THREADS) < nothing] = 0
    start[sizes == 0] = 2**16
    got = copied(file, source, start, sizes, backend, PARTLY=True)
    assert_arrays_equal(got, expected_copies(source, start, sizes), "got")


@on_both
@given(seed=SEEDS)
def test_groups_land_in_their_order(backend, seed):
    """An empty group counts too."""
    rng = np.random.default_rng(seed)
    chunks = drawn_bytes(rng, (THREADS, 3, 16))
    out = np.empty_like(chunks)
    run(
        "primitives/copy_groups",
        {"chunks": read_only(chunks), "out": out},
        backend,
        threads=THREADS,
        shared_bytes=chunks.size,
        seed=seed,
    )
    assert_arrays_equal(out, chunks, "out")


@on_both
def test_a_kernel_that_waits_for_none(backend):
    """griddepcontrol in a kernel that no other precedes or follows."""
    counts = np.arange(32, dtype=np.uint32)
    run("primitives/start_early", {"counts": counts}, backend)
    assert_arrays_equal(counts, np.arange(1, 33), "counts")
