// Turns of blocks at a query tile: the key tiles of one head add to its dQ in their order, so that
// dQ is the same in every run. One array of integers, which start at 0: how many blocks have
// started; of each query tile, whose turn it is. By whole blocks.
//
// Constants: DETERMINISTIC.
#pragma once
#include "common/ptx.cuh"

// Which tile the block takes. CUDA promises no order in which blocks start, nor that all run at
// once, so those that wait for one another are numbered as they start. A block waits for smaller
// numbers alone: they have started, and the smallest that has not ended waits for nobody.
// `shared`: four bytes that nobody uses yet.
__device__ __forceinline__ int number_of_block(void* turns, void* shared) {
    if (!DETERMINISTIC) return blockIdx.x;
    int* number = static_cast<int*>(shared);
    if (threadIdx.x == 0) *number = atomicAdd(static_cast<int*>(turns), 1);
    __syncthreads();
    const int own = *number;
    __syncthreads();                                        // all have read it
    return own;
}

__device__ __forceinline__ int* dq_semaphore(void* turns, i64 tile) {
    return static_cast<int*>(turns) + 1 + tile;
}

// Waits until the key tiles before this one have added to the tile of dQ.
__device__ __forceinline__ void semaphore_wait(const int* turn, int own) {
    if (threadIdx.x == 0) while (load_acquire(turn) != own) {}
    __syncthreads();
}

__device__ __forceinline__ void pass_turn(int* turn, int own) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) store_release(turn, own + 1);
}
