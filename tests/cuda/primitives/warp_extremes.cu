// redux_min and redux_max: each lane gets the smallest and the largest of its warp's ints. An int
// per thread.
#include "common/ptx.cuh"

struct Arguments { const int* x; int* least; int* most; };

extern "C" __global__ void warp_extremes(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.least[i] = redux_min(a.x[i]);
    a.most[i] = redux_max(a.x[i]);
}
