// The order of additions to dQ in sm90/backward_wide.cu and sm90/backward_cluster.cu, if
// DETERMINISTIC: for each of the PARTS of dQ's columns that the block adds a warp of the producer
// warpgroup, which acquires and releases the semaphore of each iteration's query tile.
//
// Memory order. The additions of a key tile precede the arrivals of their warps at `added`, which
// the ordering warp's wait observes, and so its store with release semantics at gpu scope
// (cumulativity). The load with acquire semantics of the next key tile's ordering warp observes
// that store and precedes its arrival at `acquired`, which that block's additions follow.
#pragma once
#include "sm90/backward_scheduler.cuh"

template <int PARTS> struct DqOrder {
    using Stage = PipelineState<STAGES>;                    // of Q and dO: one of each iteration
    u64 acquired[PARTS][STAGES], added[PARTS][STAGES];      // arrivals: 1, the score warps

    __device__ __forceinline__ void init_dq_order() {
        for (int i = 0; i < PARTS * STAGES; ++i) {
            mbarrier_init(shared_address(&acquired) + 8 * i, 1);
            mbarrier_init(shared_address(&added) + 8 * i, WARPGROUP / 32);
        }
    }
    // By each warp that adds.
    __device__ __forceinline__ void wait_acquired(int part, Stage stage) {
        mbarrier_wait(barrier_at(acquired[part], stage.index), stage.phase);
    }
    __device__ __forceinline__ void arrive_added(int part, Stage stage) {
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, barrier_at(added[part], stage.index));
    }
    // By the ordering warp. A query tile has several semaphores, of which this is number `own`; a
    // work tile has KEY_TILES.
    template <int KEY_TILES = 1, class Shared>
    __device__ __forceinline__ void order_additions(
        const Arguments& args, Shared& shared, int part, int own) {
        const int lane = threadIdx.x % 32;
        Stage stage;
        for_each_iteration<1, KEY_TILES>(args, shared, [&](DqAddition at) {
            int* semaphore = dq_semaphores(args, at.semaphore) + own;
            // Predecessors have smaller indices and have started: the wait ends (next_index).
            if (lane == 0 && at.acquires) while (load_acquire(semaphore) != at.rank) {}
            __syncwarp();
            mbarrier_arrive_if(lane == 0, barrier_at(acquired[part], stage.index));
            mbarrier_wait(barrier_at(added[part], stage.index), stage.phase);
            __syncwarp();
            if (lane == 0 && at.releases) store_release(semaphore, at.rank + 1);
            __syncwarp();
            stage.next();
        });
    }
};
template <> struct DqOrder<0> {
    using Stage = PipelineState<STAGES>;
    __device__ __forceinline__ void init_dq_order() {}
    __device__ __forceinline__ void wait_acquired(int, Stage) {}
    __device__ __forceinline__ void arrive_added(int, Stage) {}
    template <int KEY_TILES = 1, class Shared>
    __device__ __forceinline__ void order_additions(const Arguments&, Shared&, int, int) {}
};
