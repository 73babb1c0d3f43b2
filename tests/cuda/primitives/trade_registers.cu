// warpgroup_reg_dealloc and warpgroup_reg_alloc, on sm_90a: the first of three warpgroups gives
// registers to the others, and each thread goes on with its number. 384 threads.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* y; };

extern "C" __global__ void __launch_bounds__(384, 1)
trade_registers(const __grid_constant__ Arguments a) {
    const u32 x = a.x[threadIdx.x];
    if (threadIdx.x < 128) warpgroup_reg_dealloc<24>();
    else warpgroup_reg_alloc<240>();
    a.y[threadIdx.x] = x;
}
