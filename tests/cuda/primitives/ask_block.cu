// __syncthreads_or, twice in a row: whether a thread of the block has something in x, in y.
#include "common/ptx.cuh"

struct Arguments { const int* x; const int* y; int* any_x; int* any_y; };

extern "C" __global__ void ask_block(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.any_x[i] = __syncthreads_or(a.x[i]) != 0;
    a.any_y[i] = __syncthreads_or(a.y[i]) != 0;
}
