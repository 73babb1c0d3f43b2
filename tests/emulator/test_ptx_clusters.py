"""Instructions of common/ptx.cuh for clusters of blocks, to the bit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash.backends.emulator.machine import BoxesOf
from helpers.bits import SEEDS
from helpers.compare import assert_arrays_equal
from helpers.small_kernels import on_hopper, read_only, run

PAIR = {"CLUSTER_BLOCKS": 2}


@on_hopper
@given(seed=SEEDS, clusters=st.integers(1, 3), rounds=st.integers(1, 4))
def test_blocks_send_each_other_words(backend, seed, clusters, rounds):
    shape = clusters, 2, rounds, 128
    x = np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)
    y = np.zeros_like(x)
    arguments = {"x": read_only(x), "y": y, "rounds": rounds}
    run("primitives/cluster_exchange", arguments, backend, seed=seed,
        constants=PAIR, blocks=2 * clusters, shared_bytes=1088)  # fmt: skip
    assert_arrays_equal(y, x[:, ::-1], "y")


@on_hopper
@given(seed=SEEDS)
def test_each_block_loads_for_both(backend, seed):
    rows = 16
    x = np.random.default_rng(seed).random((1, rows, 2, 64))
    x = x.astype(np.float16)
    seen = np.zeros((2, 2, rows, 64), np.float16)
    arguments = {"x": BoxesOf(read_only(x), rows), "seen": seen}
    run("primitives/multicast_boxes", arguments, backend, seed=seed,
        constants=PAIR | {"ROWS": rows}, blocks=2,
        shared_bytes=2 * rows * 128 + 8)  # fmt: skip
    for block in seen:
        assert_arrays_equal(block, x[0].swapaxes(0, 1), "seen")
