// Blocks wait for those after them, which may not have begun.
constexpr bool DETERMINISTIC = true;
#include "common/dq_semaphore.cuh"

struct Arguments { const float* x; float* sums; int* turns; };

extern "C" __global__ void turn_of_a_later_block(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int thread = threadIdx.x, block = block_ticket(a.turns, shared_bytes);
    int* turn = a.turns + 1;
    const int place = BROKEN ? static_cast<int>(gridDim.x) - 1 - block : block;
    if (thread == 0)
        while (load_acquire(turn) != place) {}                  // caught here
    __syncthreads();
    a.sums[thread] = 2 * a.sums[thread] + a.x[block * 64 + thread];
    __syncthreads();
    if (thread == 0) store_release(turn, place + 1);
}
