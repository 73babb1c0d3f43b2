// Every block waits for its turn, none passes it on.
#include "ptx.cuh"

struct Arguments { const float* x; float* sums; int* turn; };

extern "C" __global__ void turn_never_passed(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    if (thread == 0)
        while (load_acquire(a.turn) != int(blockIdx.x)) {}      // caught here
    __syncthreads();                                            // caught here
    a.sums[thread] = 2 * a.sums[thread] + a.x[blockIdx.x * 64 + thread];
    __syncthreads();
    if (!BROKEN && thread == 0) store_release(a.turn, blockIdx.x + 1);
}
