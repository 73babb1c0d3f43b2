// On sm_90a: overwrites the source of a bulk store in flight.
#include "common/ptx.cuh"

struct Arguments { TensorMap out; const u32* x; };

extern "C" __global__ void tma_store_source_overwritten(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    u32* tile = reinterpret_cast<u32*>(shared_bytes);
    const u32 source = shared_address(tile);
    const int thread = threadIdx.x;
    for (int i = thread; i < 256; i += 64)
        tile[i / 32 * 32 + (i / 4 % 8 ^ i / 32) * 4 + i % 4] = a.x[i];
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
        tma_store(a.out, source, 0, 0, 0, 0);
        tma_store_commit();
        if constexpr (BROKEN) tile[5] = 0;                          // caught here
        tma_store_wait_read<0>();
    }
}
