// On sm_90a: a bulk store that may still read shared memory after the block's end.
#include "sm90/pipeline.cuh"

struct Arguments { TensorMap out; const u32* x; };

extern "C" __global__ void tma_store_no_wait(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    u32* tile = reinterpret_cast<u32*>(shared_bytes);
    const u32 source = shared_address(tile);
    const int thread = threadIdx.x;
    for (int i = thread; i < 256; i += 64)
        tile[i / 32 * 32 + (i / 4 % 8 ^ i / 32) * 4 + i % 4] = a.x[i];
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
        tma_store_tile<8, 64>(a.out, source, 0, 0, 0, 0);                // caught here
        if constexpr (!BROKEN) tma_store_wait_read<0>();
    }
}
