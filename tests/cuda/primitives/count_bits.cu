// __ffs and __popc: the lowest bit that is set, counted from 1, and how many are. A word per
// thread.
#include "common/ptx.cuh"

struct Arguments { const int* words; int* lowest; int* count; };

extern "C" __global__ void count_bits(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.lowest[i] = __ffs(a.words[i]);
    a.count[i] = __popc(a.words[i]);
}
