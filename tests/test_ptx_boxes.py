"""What the TMA unit copies, to the bit: boxes of tensors."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash.emulator.machine import BoxesOf
from helpers.bits import SEEDS
from helpers.small_kernels import on_hopper, read_only, run

COLUMNS, ROWS = 64, 16


def random_halves(seed, shape):
    return np.random.default_rng(seed).random(shape).astype(np.float16)


def whole_box(array, column, token, head, batch):
    """The box, with zeros where it reaches out of the array."""
    _, tokens, _, columns = array.shape
    whole = np.zeros((tokens + 2 * ROWS, columns + 4 * COLUMNS), array.dtype)
    whole[ROWS:-ROWS, 2 * COLUMNS : -2 * COLUMNS] = array[batch, :, head]
    first, left = token + ROWS, column + 2 * COLUMNS
    return whole[first : first + ROWS, left : left + COLUMNS]


@on_hopper
@given(
    tokens=st.integers(1, 40),
    columns=st.sampled_from([1, 8, 40, 64, 100, 128]),
    token=st.integers(-ROWS, 39),
    column=st.sampled_from([-64, -8, 0, 64]),
    seed=SEEDS,
)
def test_a_box_and_its_way_back(backend, tokens, columns, token, column, seed):
    width = -(-columns // 8) * 8  # rows at multiples of 16 bytes
    x = random_halves(seed, (2, tokens, 3, width))[..., :columns]
    y = np.full((2, tokens, 3, width), 7, np.float16)[..., :columns]
    seen = np.full((ROWS, COLUMNS), 7, np.float16)
    token = min(token, tokens)
    at = {"column": column, "token": token, "head": 2, "batch": 1}
    arguments = {"x": BoxesOf(read_only(x), ROWS), "y": BoxesOf(y, ROWS),
                 "seen": seen, **at}  # fmt: skip
    run("primitives/copy_boxes", arguments, backend, seed=seed,
        constants={"ROWS": ROWS}, shared_bytes=ROWS * 128 + 8)  # fmt: skip
    np.testing.assert_array_equal(seen, whole_box(x, **at))
    inside = np.zeros(y.shape, bool)
    inside[1, max(token, 0) : max(token + ROWS, 0), 2,
           max(column, 0) : max(column + COLUMNS, 0)] = True  # fmt: skip
    np.testing.assert_array_equal(y, np.where(inside, x, 7))
