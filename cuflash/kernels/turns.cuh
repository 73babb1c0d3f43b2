// Turns of blocks at a query tile: the key tiles of one head add to its dQ in their order, so that
// dQ is the same in every run. A count in global memory, which starts at 0, says whose turn it is.
// By whole blocks.
#pragma once
#include "ptx.cuh"

// Waits until the key tiles before this one have added to the tile of dQ. Their blocks have smaller
// numbers and were started earlier, so the wait ends.
__device__ __forceinline__ void wait_for_turn(const int* turn, int own) {
    if (threadIdx.x == 0) while (load_acquire(turn) != own) {}
    __syncthreads();
}

__device__ __forceinline__ void pass_turn(int* turn, int own) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) store_release(turn, own + 1);
}
