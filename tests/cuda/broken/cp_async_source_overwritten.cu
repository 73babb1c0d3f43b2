// Overwrites the source of a copy in flight.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_source_overwritten(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    a.out[thread] = a.x[thread];
    cp_async_4(shared_address(tile + thread), a.out + thread, 4);
    cp_async_commit();
    if constexpr (!BROKEN) cp_async_wait<0>();
    a.out[thread] = -1;
    if constexpr (BROKEN) cp_async_wait<0>();
    a.out[thread] = tile[thread];
}
