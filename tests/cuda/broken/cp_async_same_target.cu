// Two threads copy to the same address.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_same_target(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    const u32 target = shared_address(tile + (BROKEN ? thread / 2 : thread));
    cp_async_4(target, a.x + thread, 4);                        // caught here
    cp_async_commit();
    cp_async_wait<0>();
    a.out[thread] = tile[BROKEN ? thread / 2 : thread];
}
