// load_acquire where a block that waits is waited for: the turns are those of all blocks' last
// warps, then of the last but one, and so on. Each notes who it is.
constexpr bool DETERMINISTIC = true;
#include "common/dq_semaphore.cuh"

struct Arguments { int* turns; int* warps; };

extern "C" __global__ void warps_take_turns(const __grid_constant__ Arguments a) {
    const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int block = block_ticket(a.turns, shared_bytes);
    const int own = (num_warps - 1 - warp) * gridDim.x + block;
    int* turn = a.turns + 1;
    if (threadIdx.x % 32 != 0) return;
    while (load_acquire(turn) != own) {}
    a.warps[own] = warp;
    __threadfence();
    store_release(turn, own + 1);
}
