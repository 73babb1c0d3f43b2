// On sm_90a: a wgmma of data that other threads may not have written yet.
#include "sm90/wgmma.cuh"

struct Arguments { const u16* x; const u16* y; float* out; };

extern "C" __global__ void __launch_bounds__(WARPGROUP)
wgmma_no_syncthreads(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 x = shared_address(shared_bytes), y = x + 64 * PANEL_ROW_BYTES;
    for (int i = threadIdx.x; i < 64 * 16; i += WARPGROUP) {
        store_shared(x + tile_offset<64>(i / 16, i % 16), a.x[i]);
        store_shared(y + tile_offset<64>(i / 16, i % 16), a.y[i]);
    }
    fence_async_proxy();
    if constexpr (!BROKEN) __syncthreads();
    float d[32];
    wgmma_fence();
    const u64 x_tile = descriptor(x, 0), y_tile = descriptor(y, 0);
    wgmma_shared<1, false, false>(d, x_tile, y_tile, false, float16{});        // caught here
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    float* out = a.out + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 64 + threadIdx.x % 4 * 2;
    for (int i = 0; i < 32; ++i) out[i / 2 % 2 * 512 + i / 4 * 8 + i % 2] = d[i];
}
