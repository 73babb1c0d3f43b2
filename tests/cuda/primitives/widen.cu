// to_float: one element per thread. Constants: Element.
#include "common/ptx.cuh"

struct Arguments { const Element* x; float* y; };

extern "C" __global__ void widen(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.y[i] = to_float(a.x[i]);
}
