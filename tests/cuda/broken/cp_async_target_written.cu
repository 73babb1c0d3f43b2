// Clears the target of a copy in flight.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_target_written(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    cp_async_4(shared_address(tile + thread), a.x + thread, 4);
    cp_async_commit();
    if constexpr (BROKEN) tile[thread] = 0;                     // caught here
    cp_async_wait<0>();
    a.out[thread] = tile[thread];
}
