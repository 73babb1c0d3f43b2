// load_acquire where a block that waits is waited for: the turns are those of all blocks' last
// warps, then of the last but one, and so on. Each notes who it is.
#include "ptx.cuh"

struct Arguments { int* turn; int* warps; };

extern "C" __global__ void warps_take_turns(const __grid_constant__ Arguments a) {
    const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const int own = (num_warps - 1 - warp) * gridDim.x + blockIdx.x;
    if (threadIdx.x % 32 != 0) return;
    while (load_acquire(a.turn) != own) {}
    a.warps[own] = warp;
    __threadfence();
    store_release(a.turn, own + 1);
}
