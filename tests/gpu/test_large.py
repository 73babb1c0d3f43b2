"""Large inputs: offsets beyond 2^31, and memory."""

import numpy as np
import pytest

import cuflash
from helpers import expected
from helpers.backends import CupyBackend
from helpers.compare import (
    assert_elements,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, inputs

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
MIB = 1 << 20
AXES = {"batch": 0, "token": 1, "head": 2}


def needs(cp, nbytes):
    cp.get_default_memory_pool().free_all_blocks()
    free, _ = cp.cuda.runtime.memGetInfo()
    if free < nbytes:
        pytest.skip(f"needs {nbytes >> 30} GiB of free GPU memory")


class Far:
    """One buffer of 2^31 elements in which arrays lie stretched out.

    Each array gets a stride on one axis such that its last index begins
    beyond 2^31 elements. Arrays of one shape have one stride, so they lie
    side by side in each other's gaps.
    """

    def __init__(self, cp, dtype):
        self.size = (1 << 31) + (1 << 25)
        self.buffer = cp.full(self.size * dtype.itemsize, 0xFF, cp.uint8)
        self.cp, self.start = cp, 0

    def place(self, array, axis):
        inner = array.size // array.shape[axis]
        step = -(-(1 << 31) // (array.shape[axis] - 1))
        step += -step % 8
        others = [n for i, n in enumerate(array.shape) if i != axis]
        strides = [int(np.prod(others[i + 1 :])) for i in range(3)]
        strides.insert(axis, step)
        itemsize = array.dtype.itemsize
        view = self.cp.ndarray(
            array.shape,
            array.dtype,
            memptr=self.buffer.data + self.start * itemsize,
            strides=tuple(s * itemsize for s in strides),
        )
        self.start += inner
        view[...] = self.cp.asarray(array)
        assert view.strides[axis] * (array.shape[axis] - 1) >= itemsize << 31
        return view


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offsets_beyond_two_to_the_31(cp, dtype, axis):
    case = Case(dtype, 2, 130, 130, 2, 2, 64, 64, causal=True)
    arrays = inputs(case)
    needs(cp, (arrays[0].dtype.itemsize << 31) * 5 // 4)
    far = Far(cp, arrays[0].dtype)
    q, k, v, dout = (far.place(x, AXES[axis]) for x in arrays)
    out = far.place(np.zeros_like(arrays[3]), AXES[axis])
    _, lse = cuflash.forward(q, k, v, causal=True, out=out, return_lse=True)
    grads = cuflash.backward(dout, q, k, v, out, lse, causal=True)
    want = expected.forward(*arrays[:3], causal=True)
    assert_matches(cp.asnumpy(out), want[0], "out", case)
    want = expected.backward(arrays[3], *arrays[:3], causal=True)
    assert_gradients_match([cp.asnumpy(x) for x in grads], want, case)


def test_results_of_more_than_two_to_the_31_elements(cp):
    """Equal weights; v contains the index of its batch."""
    batch, tokens, heads, d = 65, 8192, 32, 128
    needs(cp, batch * tokens * heads * d * 2 * 5 // 2)
    row = cp.ones((1, 1, 1, d), cp.float16)
    q = cp.broadcast_to(row, (batch, tokens, heads, d))
    k = cp.broadcast_to(row, (batch, 16, heads, d))
    v = cp.arange(batch, dtype=cp.float16)[:, None, None, None]
    v = cp.broadcast_to(v * row, (batch, 16, heads, d))
    out = cuflash.forward(q, k, v)
    assert out.size > 1 << 31
    # 16 equal weights of 1/16 and integers below 2048: no rounding at all.
    for b in range(batch):
        assert_elements(out[b], b, "out[b]")


def growth(cp, call):
    """Return the bytes that a call adds to the pool at its peak."""
    call()  # compiles; small leftovers of the first call are not counted
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result = call()
    peak = pool.total_bytes() - before
    del result
    return peak


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_grows_with_rows_and_not_with_pairs(cp, dtype):
    """At 65,536 tokens a matrix of pairs would take 8 GiB a head."""
    n, heads, d = 65536, 2, 64
    case = Case(dtype, 1, n, n, heads, heads, d, d)
    q, k, v, dout = (GPU.place(x) for x in inputs(case))
    row = 4 * heads * n  # a float32 for each row
    slack = 2 * MIB  # the pool's rounding, tiles at the end

    def forward():
        return cuflash.forward(q, k, v, causal=True, return_lse=True)

    assert growth(cp, forward) <= q.nbytes + 4 * row + slack
    out, lse = forward()

    def backward():
        return cuflash.backward(dout, q, k, v, out, lse, causal=True)

    assert growth(cp, backward) <= 3 * q.nbytes + row * d + 4 * row + slack
