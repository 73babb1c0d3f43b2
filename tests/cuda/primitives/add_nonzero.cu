// reduce_add_nonzero: thread i adds x[i] to the float at index to[i], which may be none if x[i] is
// 0.
#include "common/ptx.cuh"

struct Arguments { const float* x; const int* to; float* sums; };

extern "C" __global__ void add_nonzero(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    reduce_add_nonzero(opaque(a.sums + a.to[i]), a.x[i]);
}
