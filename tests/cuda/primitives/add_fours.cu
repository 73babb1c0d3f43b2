// reduce_add_4: thread i adds its four floats to the four at index to[i].
#include "common/ptx.cuh"

struct Arguments { const float4* x; const int* to; float* sums; };

extern "C" __global__ void add_fours(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float x[4] = {a.x[i].x, a.x[i].y, a.x[i].z, a.x[i].w};
    reduce_add_4(a.sums + a.to[i] * 4, x);
}
