// __shfl_xor_sync: thread i gets the value of the lane that differs in the bits distance[i] of its
// number. Only the lanes of `mask` take part. Constants: T.
#include "common/ptx.cuh"

struct Arguments { const T* x; const int* distance; const u32* mask; T* y; };

extern "C" __global__ void exchange_lanes(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 mask = *a.mask;
    const int distance = a.distance[i];
    const T x = a.x[i];
    if (mask >> threadIdx.x % 32 & 1) a.y[i] = __shfl_xor_sync(mask, x, distance);
}
