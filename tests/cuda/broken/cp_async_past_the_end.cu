// Copies 16 bytes where the array has 8 left.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_past_the_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, first = thread * 4;
    if (first < 62) {
        const int bytes = BROKEN ? 16 : min(62 - first, 4) * 4;
        cp_async_16_partly(shared_address(tile + first), a.x + first, bytes);   // caught here
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (thread < 62) a.out[thread] = tile[thread];
}
