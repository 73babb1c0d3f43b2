// On sm_90a: warps wait for registers that no other warp releases.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __launch_bounds__(384, 1)
setmaxnreg_never_given(const __grid_constant__ Arguments a) {
    if (threadIdx.x >= 128) warpgroup_reg_alloc<240>();              // caught here
    else if (!BROKEN) warpgroup_reg_dealloc<24>();
    a.out[threadIdx.x] = a.x[threadIdx.x];
}
