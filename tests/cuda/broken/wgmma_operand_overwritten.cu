// On sm_90a: overwrites registers of A of a wgmma in flight.
#include "sm90/wgmma.cuh"

struct Arguments { const u16* x; const u16* y; float* out; };

extern "C" __global__ void __launch_bounds__(WARPGROUP)
wgmma_operand_overwritten(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 y = shared_address(shared_bytes);
    for (int i = threadIdx.x; i < 64 * 16; i += WARPGROUP)
        store_shared(y + tile_offset<16>(i % 16, i / 16), a.y[i]);
    fence_async_proxy();
    __syncthreads();
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    float d[32];
    u32 fragment[4];
    for (int i = 0; i < 4; ++i)
        fragment[i] = *reinterpret_cast<const u32*>(
            a.x + (row + i % 2 * 8) * 16 + column + i / 2 * 8);
    wgmma_fence();
    wgmma_registers<1, true>(d, fragment, descriptor(y, 0), false, float16{});
    wgmma_commit();
    if constexpr (BROKEN) fragment[threadIdx.x % 4] = 0;                // caught here
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    float* out = a.out + row * 64 + column;
    for (int i = 0; i < 32; ++i) out[i / 2 % 2 * 512 + i / 4 * 8 + i % 2] = d[i];
}
