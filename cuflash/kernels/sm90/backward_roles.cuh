// Backward kernels on Hopper whose consumer warpgroups share the same keys and divide the results:
// sm90/backward_wide.cu and sm90/double_backward.cu.
#pragma once
#include "sm90/backward_scheduler.cuh"

// A warp's 16 rows of P^T or dS^T, for the warpgroups that need them, from first_column on.
__device__ __forceinline__ void publish(
    u32 tile, u32 full, const u32 (&rounded)[S_REGS / 2], int warp_row, int lane,
    int first_column = 0) {
    store_rows<BLOCK_K>(tile, warp_row, lane, rounded, first_column);
    fence_async_proxy();
    __syncwarp();
    mbarrier_arrive_if(lane == 0, full);
}

// Barrier 0 is __syncthreads. SEMAPHORE_ACQUIRED: an iteration's dQ may be added; DQ_ADDED: it has
// been.
constexpr int SEMAPHORE_ACQUIRED = 1, DQ_ADDED = 2, SEMAPHORE_THREADS = WARPGROUP + 32;

// If DETERMINISTIC, one warp acquires and releases the semaphore of each query tile's dQ.
template <class Shared>
__device__ __forceinline__ void order_dq_additions(const Arguments& args, Shared& shared) {
    const int lane = threadIdx.x % 32;
    for_each_iteration<1>(args, shared, [&](DqAddition at) {
        int* semaphore = dq_semaphores(args, at.semaphore);
        // Predecessors have smaller indices and have started: the wait ends (next_index).
        if (lane == 0 && at.acquires) while (load_acquire(semaphore) != at.rank) {}
        __syncwarp();
        barrier_arrive(SEMAPHORE_ACQUIRED, SEMAPHORE_THREADS);
        barrier_sync(DQ_ADDED, SEMAPHORE_THREADS);
        if (lane == 0) store_release(semaphore, at.rank + 1);   // covers additions before it
        __syncwarp();
    });
}
