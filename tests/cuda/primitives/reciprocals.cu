// reciprocal_approx: one number per thread.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* y; };

extern "C" __global__ void reciprocals(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.y[i] = reciprocal_approx(a.x[i]);
}
