// On sm_90a: two warps wait for each other at two different barriers.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void bar_sync_of_another_barrier(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    tile[thread] = a.x[thread];
    barrier_sync(BROKEN ? 1 + thread / 32 : 1, 64);             // caught here
    a.out[thread] = tile[63 - thread] + tile[thread] - tile[63 - thread];
}
