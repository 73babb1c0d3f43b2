// One warp waits for its block's turn, the others go ahead.
constexpr bool DETERMINISTIC = true;
#include "common/dq_semaphore.cuh"

struct Arguments { const float* x; float* sums; int* turns; };

extern "C" __global__ void turn_not_waited_for(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int thread = threadIdx.x, block = block_ticket(a.turns, shared_bytes);
    int* turn = a.turns + 1;
    if (thread == 0)
        while (load_acquire(turn) != block) {}
    if constexpr (BROKEN) __syncwarp();
    else __syncthreads();
    a.sums[thread] = 2 * a.sums[thread] + a.x[block * 64 + thread];
    __syncthreads();
    if (thread == 0) store_release(turn, block + 1);
}
