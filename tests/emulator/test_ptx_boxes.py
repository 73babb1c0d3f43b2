"""TMA copies of boxes of tensors, to the bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.backends.emulator.machine import BoxesOf
from cuflash.errors import KernelFault
from helpers.bits import SEEDS
from helpers.compare import assert_arrays_equal
from helpers.host_compiler import needs_compiler
from helpers.small_kernels import on_hopper, read_only, run

COLUMNS, ROWS = 64, 16


def random_halves(seed, shape):
    return np.random.default_rng(seed).random(shape).astype(np.float16)


def whole_box(array, column, token, head, batch):
    """Return the box, with zeros past the array's end."""
    _, tokens, _, columns = array.shape
    whole = np.zeros((tokens + 2 * ROWS, columns + 2 * COLUMNS), array.dtype)
    whole[:tokens, :columns] = array[batch, :, head]
    return whole[token : token + ROWS, column : column + COLUMNS]


def check_a_box(backend, tokens, columns, token, column, seed, **options):
    """Load a box of x, read it, store it in y."""
    width = -(-columns // 8) * 8  # rows at multiples of 16 bytes
    x = random_halves(seed, (2, tokens, 3, width))[..., :columns]
    y = np.full((2, tokens, 3, width), 7, np.float16)[..., :columns]
    seen = np.full((ROWS, COLUMNS), 7, np.float16)
    token = min(token, tokens)
    at = {"column": column, "token": token, "head": 2, "batch": 1}
    arguments = {"x": BoxesOf(read_only(x), ROWS), "y": BoxesOf(y, ROWS),
                 "seen": seen, **at}  # fmt: skip
    run("primitives/copy_boxes", arguments, backend, seed=seed,
        constants={"ROWS": ROWS}, shared_bytes=ROWS * 128 + 8,
        **options)  # fmt: skip
    assert_arrays_equal(seen, whole_box(x, **at), "seen")
    inside = np.zeros(y.shape, bool)
    inside[1, token : token + ROWS, 2, column : column + COLUMNS] = True
    assert_arrays_equal(y, np.where(inside, x, 7), "y")


@on_hopper
@given(
    tokens=st.integers(1, 40),
    columns=st.sampled_from([1, 8, 40, 64, 100, 128]),
    token=st.integers(0, 40),
    column=st.sampled_from([0, 8, 64]),
    seed=SEEDS,
)
def test_a_box_loaded_and_stored(
    backend, tokens, columns, token, column, seed
):
    check_a_box(backend, tokens, columns, token, column, seed)


@needs_compiler
def test_a_box_before_the_start_is_a_fault():
    x, seen = np.zeros((1, 16, 1, 64), np.float16), np.zeros((16, 64))
    at = {"column": 0, "token": -1, "head": 0, "batch": 0}
    arguments = {"x": BoxesOf(x, ROWS), "y": BoxesOf(x.copy(), ROWS)}
    with pytest.raises(KernelFault, match=r"at \(0, -1, 0, 0\), before"):
        run("primitives/copy_boxes", {**arguments, "seen": seen, **at},
            constants={"ROWS": ROWS}, shared_bytes=ROWS * 128 + 8)  # fmt: skip


@needs_compiler
def test_a_store_lands_when_its_thread_has_ended():
    """The map on the stack is gone by then: --coverage overwrites it."""
    check_a_box("emulated", 1, 1, 0, 8, seed=0, flags=("--coverage",))
