// The producer of Q in forward.cu and forward_wide.cu, which also publishes the query tiles.
//
// Shared has q_stage(), the address of a stage of Q, its barriers q_full and q_empty, and
// work_tiles.
#pragma once
#include "sm90/forward_scheduler.cuh"

// Q producer: one thread, with DYNAMIC_SCHEDULER one warp. Publishes each work tile and loads its
// Q.
template <class Shared>
__device__ __forceinline__ void load_queries(const Arguments& args, Shared& shared) {
    TileScheduler scheduler(args);
    PipelineState<1> request;
    for (PipelineState<Q_STAGES> q;; q.next(), request.next()) {
        shared.work_tiles.wait_for_request(request.phase ^ 1);
        if (DYNAMIC_SCHEDULER) __syncwarp();                // all lanes have seen this request
        const WorkTile tile = next_work_tile(scheduler, args);
        if (DYNAMIC_SCHEDULER && threadIdx.x != 0) {
            if (tile.num_rows == 0) return;
            continue;
        }
        const u32 full = shared_address(&shared.q_full[q.index]);
        mbarrier_wait(shared_address(&shared.q_empty[q.index]), q.phase ^ 1);
        shared.work_tiles[work_slot(q)] = tile;
        shared.work_tiles.publish(work_slot(q));
        if (tile.num_rows == 0) {
            mbarrier_arrive(full);
            return;
        }
        tma_load_tile<BLOCK_Q, HEAD_DIM>(
            shared.q_stage(q.index), args.q_map, full,
            tile.first_q + tile.q_start, tile.head, tile.batch);
    }
}
