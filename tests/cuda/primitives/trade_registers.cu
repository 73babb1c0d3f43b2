// warpgroup_reg_dealloc and warpgroup_reg_alloc, on sm_90a: the first warpgroup gives registers to
// the others, and each thread goes on with its number.
// Constants: NUM_THREADS, BLOCKS_PER_SM, FEWER, MORE.
// A thread starts with as many registers as BLOCKS_PER_SM allows; it then has FEWER or MORE.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* y; };

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
trade_registers(const __grid_constant__ Arguments a) {
    const u32 x = a.x[threadIdx.x];
    if (threadIdx.x < 128) warpgroup_reg_dealloc<FEWER>();
    else warpgroup_reg_alloc<MORE>();
    a.y[threadIdx.x] = x;
}
