"""Reading K and V alone: the limit of a decode call.

A kernel that reads each byte once and adds the words up, so that the loads
are not optimised away and the sum shows that each was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from .checks import WrongResult

THREADS = 256
BLOCKS_PER_SM = 8  # all resident at once, 2,048 threads

# Thread t adds up chunks t, t + threads, ... of 16 bytes, four in flight.
SOURCE = """
__device__ unsigned added(uint4 x) { return x.x + x.y + x.z + x.w; }

extern "C" __global__ void __launch_bounds__(256, 8) read_both(
    const uint4* __restrict__ k, const uint4* __restrict__ v,
    size_t chunks,  // of each
    unsigned* __restrict__ sums)  // one per warp
{
    const size_t threads = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t warp = i / 32;
    unsigned sum = 0;
    for (; i + threads < chunks; i += 2 * threads) {
        const uint4 k0 = __ldg(k + i), k1 = __ldg(k + i + threads);
        const uint4 v0 = __ldg(v + i), v1 = __ldg(v + i + threads);
        sum += added(k0) + added(k1) + added(v0) + added(v1);
    }
    if (i < chunks) sum += added(__ldg(k + i)) + added(__ldg(v + i));
    for (int lanes = 16; lanes; lanes /= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
}
"""


def prepare(cell: Any, inputs: Any) -> Callable[[], tuple]:
    """Return a function that queues the kernel: see `Runner.prepare`."""
    k, v = inputs.k, inputs.v
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    chunks = k.nbytes // 16
    blocks = min(
        math.ceil(chunks / THREADS),
        BLOCKS_PER_SM * properties["multiProcessorCount"],
    )
    kernel = cupy.RawKernel(SOURCE, "read_both")
    sums = cupy.empty(blocks * THREADS // 32, cupy.uint32)
    arguments = k, v, np.uint64(chunks), sums

    def call() -> tuple:
        kernel((blocks,), (THREADS,), arguments)
        return (sums,)

    return call


def checker(cell: Any, inputs: Any) -> Callable[[str, tuple], float]:
    """Return a check of the sum of all words, modulo 2^32."""
    want = _sum(inputs.k) + _sum(inputs.v)

    def check(name: str, results: tuple) -> float:
        if (_sum(results[0]) - want) % (1 << 32):
            raise WrongResult(f"{name}, {cell}: not every byte was read once")
        return 0.0

    return check


def _sum(array: Any) -> int:
    words = array.reshape(-1).view(cupy.uint32)
    return int(words.sum(dtype=cupy.uint32))
