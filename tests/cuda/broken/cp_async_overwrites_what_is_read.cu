// Prefetches into the one of two buffers that other warps may still read.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_overwrites_what_is_read(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = 63 - thread;
    const auto load = [&](int i) {
        float* target = tile + i % 2 * 64 + thread;
        if (i < 8) cp_async_4(shared_address(target), a.x + i * 64 + thread, 4);  // caught here
        cp_async_commit();
    };
    load(0);
    for (int i = 0; i < 8; ++i) {
        load(i + 1);
        cp_async_wait<1>();
        __syncthreads();
        a.out[i * 64 + other] = tile[i % 2 * 64 + other];       // caught here
        if constexpr (!BROKEN) __syncthreads();
    }
}
