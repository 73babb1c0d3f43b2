// On sm_90a: warps wait for more registers than others release.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __launch_bounds__(384, 1)
setmaxnreg_too_many(const __grid_constant__ Arguments a) {
    if (threadIdx.x < 128) warpgroup_reg_dealloc<24>();
    else warpgroup_reg_alloc<BROKEN ? 248 : 240>();                  // caught here
    a.out[threadIdx.x] = a.x[threadIdx.x];
}
