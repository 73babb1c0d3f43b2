// threadIdx, blockIdx, blockDim and gridDim, as every thread of the launch sees them, by way of
// make_float4: one float4 per thread.
#include "common/ptx.cuh"

struct Arguments { float4* out; };

extern "C" __global__ void coordinates(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.out[i] = make_float4(threadIdx.x, blockIdx.x, blockDim.x, gridDim.x);
}
