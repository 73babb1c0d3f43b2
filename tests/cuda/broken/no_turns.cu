// Blocks add to one sum in two steps each: others may come in between.
constexpr bool DETERMINISTIC = true;
#include "common/dq_semaphore.cuh"

struct Arguments { const float* x; float* sums; int* turns; };

extern "C" __global__ void no_turns(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int thread = threadIdx.x, block = block_ticket(a.turns, shared_bytes);
    int* turn = a.turns + 1;
    if (!BROKEN && thread == 0)
        while (load_acquire(turn) != block) {}
    __syncthreads();
    const float sum = 2 * a.sums[thread];
    __syncthreads();
    a.sums[thread] = sum + a.x[block * 64 + thread];
    __syncthreads();
    if (!BROKEN && thread == 0) store_release(turn, block + 1);
}
