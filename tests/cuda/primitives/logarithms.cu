// exp and log of a T, and logf of the same as a float: one number per thread. Constants: T.
#include "common/ptx.cuh"

struct Arguments { const T* x; T* power; T* logarithm; float* of_float; };

extern "C" __global__ void logarithms(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.power[i] = exp(a.x[i]);
    a.logarithm[i] = log(a.x[i]);
    a.of_float[i] = logf(static_cast<float>(a.x[i]));
}
