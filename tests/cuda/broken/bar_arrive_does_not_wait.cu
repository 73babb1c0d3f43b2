// On sm_90a: reads another warp's writes after arriving at a barrier without waiting.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void bar_arrive_does_not_wait(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    if (thread < 32) tile[thread] = a.x[thread];                // caught here
    if (BROKEN || thread < 32) barrier_arrive(1, 64);
    else barrier_sync(1, 64);
    if (thread >= 32) {
        a.out[thread - 32] = tile[thread - 32];                 // caught here
        a.out[thread] = a.x[thread];
    }
}
