// Blocks wait for those after them, which may not have begun.
#include "ptx.cuh"

struct Arguments { const float* x; float* sums; int* turn; };

extern "C" __global__ void turn_of_a_later_block(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x, block = blockIdx.x, last = gridDim.x - 1;
    const int place = BROKEN ? last - block : block;
    if (thread == 0)
        while (load_acquire(a.turn) != place) {}                // caught here
    __syncthreads();
    a.sums[thread] = 2 * a.sums[thread] + a.x[block * 64 + thread];
    __syncthreads();
    if (thread == 0) store_release(a.turn, place + 1);
}
