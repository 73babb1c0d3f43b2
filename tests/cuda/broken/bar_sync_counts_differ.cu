// On sm_90a: two warps arrive at a barrier with different thread counts.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void bar_sync_counts_differ(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    tile[thread] = a.x[thread];
    barrier_sync(1, BROKEN ? 64 + thread / 32 * 32 : 64);       // caught here
    a.out[thread] = tile[63 - thread] + tile[thread] - tile[63 - thread];
}
