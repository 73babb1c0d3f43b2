// Every block waits for its turn, none passes it on.
constexpr bool DETERMINISTIC = true;
#include "common/dq_semaphore.cuh"

struct Arguments { const float* x; float* sums; int* turns; };

extern "C" __global__ void turn_never_passed(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int thread = threadIdx.x, block = block_ticket(a.turns, shared_bytes);
    int* turn = a.turns + 1;
    if (thread == 0)
        while (load_acquire(turn) != block) {}                  // caught here
    __syncthreads();                                            // caught here
    a.sums[thread] = 2 * a.sums[thread] + a.x[block * 64 + thread];
    __syncthreads();
    if (!BROKEN && thread == 0) store_release(turn, block + 1);
}
