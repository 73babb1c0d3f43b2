// On sm_90a: waits for all wgmma groups but the newest, and reads its accumulator.
#include "sm90/wgmma.cuh"

struct Arguments { const u16* x; const u16* y; float* out; };

extern "C" __global__ void __launch_bounds__(WARPGROUP)
wgmma_waits_for_one_too_few(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 x = shared_address(shared_bytes), y = x + 64 * PANEL_ROW_BYTES;
    for (int i = threadIdx.x; i < 64 * 16; i += WARPGROUP) {
        store_shared(x + tile_offset<64>(i / 16, i % 16), a.x[i]);
        store_shared(y + tile_offset<64>(i / 16, i % 16), a.y[i]);
    }
    fence_async_proxy();
    __syncthreads();
    float d[32], e[32];
    wgmma_fence();
    wgmma_shared<1, false, false>(e, descriptor(x, 0), descriptor(y, 0), false, float16{});
    wgmma_commit();
    wgmma_shared<1, false, false>(d, descriptor(x, 0), descriptor(y, 0), false, float16{});
    wgmma_commit();
    wgmma_wait<BROKEN ? 1 : 0>();
    warpgroup_fence_operand(d);
    warpgroup_fence_operand(e);
    float* out = a.out + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 64 + threadIdx.x % 4 * 2;
    for (int i = 0; i < 32; ++i) out[i / 2 % 2 * 512 + i / 4 * 8 + i % 2] = d[i];    // caught here
}
