// Deterministic dQ: the key tiles of one head add to a query tile's dQ in order, so that dQ is the
// same in every run. Called by whole blocks, or by all of Threads (thread_groups.cuh).
//
// A semaphore of each query tile counts the key tiles that have added to it. Semaphores and the
// counter of tickets are zeroed before the kernel.
#pragma once
#include "common/constants.cuh"
#include "common/scheduler.cuh"
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

// The index of a query tile among those of all query heads.
__device__ __forceinline__ i64 query_tile_index(
    const BackwardArguments& arrays, int batch, int head, int num_q_tiles, int q_tile) {
    return (static_cast<i64>(batch) * arrays.shape.num_heads_q + head) * num_q_tiles + q_tile;
}

// A key tile's addition to a query tile: how many key tiles add before, and whether one does.
// AHEAD: whether it is the key tile's first of a head, and how many of the head's come after it.
struct DqPlace {
    int rank;
    bool has_predecessor, is_first = false;
    int tiles_after = 0;
};

// How a block, or some of its warps (Threads), adds to the dQ of one query tile after another.
//
// AHEAD: the key tile before visits a head's query tiles in the same order. So a semaphore also
// says that it has added to those visited before. A block then releases every RELEASE_INTERVAL-th
// query tile's, as a warp waits for the fence of each store. It acquires those of 32 query tiles at
// once, and none for query tiles that it knows its predecessor to be ahead.
template <class Threads = WholeBlock, bool AHEAD = false> struct DqSemaphore {
    // With 4, successors wait longer; with 2 as well, where all begin with the last query tile.
    static constexpr int RELEASE_INTERVAL = AHEAD ? 2 : 1;
    bool descends = false;                                  // AHEAD: from the last query tile on
    int* semaphore = nullptr;                               // acquired, to be released
    int next_rank = 0;
    int ready = 0;                                          // AHEAD: acquired query tiles after it
    int unreleased = 0;                                     // AHEAD: query tiles up to it

    // By each warp, before it adds to a tile of dQ: until `rank` key tiles, those before this one,
    // have added to it.
    __device__ __forceinline__ void wait(int* of_tile, int rank) {
        wait(of_tile, DqPlace{rank, rank > 0});
    }
    __device__ __forceinline__ void wait(int* of_tile, DqPlace place) {
        if (!DETERMINISTIC) return;
        const int rank = place.rank;
        if constexpr (AHEAD) {
            if (place.is_first) {
                release_at_once();                          // the head before: added, a barrier ago
                ready = 0;
            }
            if (place.has_predecessor && --ready < 0) acquire(of_tile, rank, place.tiles_after);
        } else {
            if (place.has_predecessor && threadIdx.x % 32 == 0)
                while (load_acquire(of_tile) != rank) {}
        }
        __syncwarp();
        semaphore = of_tile;
        next_rank = rank + 1;
        if (AHEAD) ++unreleased;
    }
    // After a barrier of Threads that follows their additions. If those are complete by then, the
    // store need not wait for them.
    __device__ __forceinline__ void release() {
        const int interval = descends ? 1 : RELEASE_INTERVAL;
        if (!DETERMINISTIC || (AHEAD && unreleased < interval)) return;
        release_at_once();
    }
    // The same at once, by all of Threads: after the last additions.
    __device__ __forceinline__ void finish() {
        if (!DETERMINISTIC) return;
        Threads::sync();
        release_at_once();
    }

private:
    __device__ __forceinline__ void release_at_once() {
        const bool has_added = AHEAD ? unreleased > 0 : semaphore != nullptr;
        if (Threads::rank() == 0 && has_added) store_release(semaphore, next_rank);
        if (AHEAD) unreleased = 0;
        else semaphore = nullptr;
    }
    // tiles_after: of the head.
    __device__ __forceinline__ void acquire(int* of_tile, int rank, int tiles_after) {
        const int ahead = 31 - threadIdx.x % 32, step = descends ? -1 : 1;
        u32 acquired;
        do {
            const int seen = ahead <= tiles_after ? load_acquire(of_tile + ahead * step) : -1;
            acquired = __ballot_sync(0xFFFFFFFFu, seen == rank);
        } while (acquired == 0);
        ready = 32 - __ffs(acquired);                       // by the first lane: the farthest ahead
    }
};

// Adds the lane's sums to the dQ of query tile q_tile, by the family's add_to_dq(); if
// DETERMINISTIC, the key tiles add in their order. All of Threads.
template <class Threads, class ScoreTile, class Sums>
__device__ __forceinline__ void add_to_dq_in_order(
    DqSemaphore<Threads>& dq_semaphore, const BackwardArguments& arrays,
    const ScoreTile& score_tile, TileCoord coord, int head, int q_tile, int num_q_tiles,
    const Sums& sums) {
    const i64 index = query_tile_index(arrays, coord.batch, head, num_q_tiles, q_tile);
    dq_semaphore.wait(arrays.dq_semaphores + index, score_tile.dq_rank(q_tile, coord.tile));
    add_to_dq(arrays, coord.batch, head, score_tile.q_start, sums);
}
