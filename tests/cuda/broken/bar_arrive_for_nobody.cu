// On sm_90a: one warp arrives at a barrier once more than the other.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void bar_arrive_for_nobody(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    if (thread < 32) tile[thread] = a.x[thread];
    if (thread < 32) barrier_arrive(1, 64);
    else barrier_sync(1, 64);
    if (BROKEN && thread >= 32) barrier_arrive(1, 64);          // caught here
    if (thread >= 32) {
        a.out[thread - 32] = tile[thread - 32];
        a.out[thread] = a.x[thread];
    }
}
