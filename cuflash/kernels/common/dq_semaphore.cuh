// Deterministic dQ: the key tiles of one head add to a query tile's dQ in order, so that dQ is the
// same in every run. All functions are called by whole blocks, or by all of Threads
// (thread_groups.cuh).
//
// A semaphore of each query tile counts the key tiles that have added to it. Semaphores and the
// counter of tickets are zeroed before the kernel.
//
// Constants: DETERMINISTIC.
#pragma once
#include "common/thread_groups.cuh"

// Which tile the block takes. CUDA neither promises an order in which blocks start nor that all run
// at once, so blocks that wait for one another take tickets as they start. No deadlock: a block
// waits only for smaller tickets, whose blocks have started, and the smallest ticket that has not
// ended waits for nobody. `shared_bytes`: four bytes that are not in use yet.
__device__ __forceinline__ int block_ticket(int* tile_counter, void* shared_bytes) {
    if (!DETERMINISTIC) return blockIdx.x;
    int* shared = static_cast<int*>(shared_bytes);
    if (threadIdx.x == 0) *shared = atomicAdd(tile_counter, 1);
    __syncthreads();
    const int ticket = *shared;
    __syncthreads();                                        // all have read it
    return ticket;
}

// Waits until `rank` key tiles, those before this one, have added to the tile of dQ.
template <class Threads = WholeBlock>
__device__ __forceinline__ void semaphore_wait(const int* semaphore, int rank) {
    if (Threads::rank() == 0) while (load_acquire(semaphore) != rank) {}
    Threads::sync();
}

template <class Threads = WholeBlock>
__device__ __forceinline__ void semaphore_release(int* semaphore, int rank) {
    __threadfence();
    Threads::sync();
    if (Threads::rank() == 0) store_release(semaphore, rank + 1);
}

// Calls add(), which adds to the tile of dQ; if DETERMINISTIC, in the key tile's turn.
template <class Threads = WholeBlock, class Add>
__device__ __forceinline__ void add_in_order(int* semaphore, int rank, const Add& add) {
    if (DETERMINISTIC) semaphore_wait<Threads>(semaphore, rank);
    add();
    if (DETERMINISTIC) semaphore_release<Threads>(semaphore, rank);
}
