// Adds to four floats whose address is not a multiple of 16.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void reduce_misaligned(const __grid_constant__ Arguments a) {
    const int i = threadIdx.x * 4;
    for (int j = i; j < i + 4; ++j) a.out[j] = 0;
    const float x[4] = {a.x[i], a.x[i + 1], a.x[i + 2], a.x[i + 3]};
    reduce_add_4(a.out + (BROKEN ? i + 1 : i), x);              // caught here
}
