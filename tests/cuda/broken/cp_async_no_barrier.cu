// Each thread waits for its own copy and then reads another's.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_no_barrier(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = 63 - thread;
    cp_async_4(shared_address(tile + thread), a.x + thread, 4);
    cp_async_commit();
    cp_async_wait<0>();
    if constexpr (!BROKEN) __syncthreads();
    a.out[other] = tile[other];                                 // caught here
}
