// Shared memory and producers of sm90/double_backward.cu. All loads are TMA copies.
//
// mbarriers. *_full: an arrival of a producer thread for each copy, and its bytes; pw_full, ds_full
// and t_full, from the scores to the gradients: an arrival of each of a role's warps. empty: an
// arrival of each warp of the gradients, which read a stage last. kv_empty: of each warp of the
// scores and of d2Q. work_*: backward_scheduler.cuh.
//
// Constants: Element, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K, STAGES, SHARED_BYTES; Q_DOT, K_DOT,
// V_DOT: what moves.
#pragma once
#include "sm90/backward_producer.cuh"
#include "sm90/second_rows.cuh"

constexpr int ROLE_WARPS = WARPGROUP / 32;

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot;
    SmemTile<BLOCK_Q, HEAD_DIM> q[STAGES], q_dot[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> pw[STAGES], ds[STAGES], t[STAGES];    // transposed
    SecondRows rows[STAGES];
    u64 q_full[STAGES], dout_full[STAGES], empty[STAGES];
    u64 pw_full[STAGES], ds_full[STAGES], t_full[STAGES];
    u64 k_full, v_full, kv_empty, work_full[WORK_STAGES], work_empty[WORK_STAGES];
    WorkTile work_tiles[WORK_STAGES];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_barriers(SharedPlan& shared) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared_address(&shared.q_full[i]), 1 + Q_DOT);
        mbarrier_init(shared_address(&shared.dout_full[i]), 1);
        mbarrier_init(shared_address(&shared.empty[i]), 2 * ROLE_WARPS);
        mbarrier_init(shared_address(&shared.pw_full[i]), ROLE_WARPS);
        mbarrier_init(shared_address(&shared.ds_full[i]), ROLE_WARPS);
        mbarrier_init(shared_address(&shared.t_full[i]), ROLE_WARPS);
    }
    mbarrier_init(shared_address(&shared.k_full), 1 + K_DOT);
    mbarrier_init(shared_address(&shared.v_full), 1 + V_DOT);
    mbarrier_init(shared_address(&shared.kv_empty), 2 * ROLE_WARPS);
    for (int i = 0; i < WORK_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.work_full[i]), 1);
        // the three roles, the producer of keys, the semaphore's warp
        mbarrier_init(
            shared_address(&shared.work_empty[i]), 3 * ROLE_WARPS + 1 + DQ_SEMAPHORES);
    }
    fence_mbarrier_init();
}

// One iteration's Q, ddQ, row statistics and dO.
__device__ __forceinline__ void load_queries(
    const Arguments& args, SharedPlan& shared, PipelineState<STAGES> stage, int batch,
    const QueryTileIterator& it) {
    const u32 q_full = shared_address(&shared.q_full[stage.index]);
    const int token = it.tile * BLOCK_Q;
    mbarrier_wait(shared_address(&shared.empty[stage.index]), stage.phase ^ 1);
    bulk_load(shared_address(&shared.rows[stage.index]),
              static_cast<const SecondRows*>(args.query_rows)
                  + query_tile_index(args, NoSequence{}, batch, it.head, it.tile),
              q_full, sizeof(SecondRows));
    tma_load_tile<BLOCK_Q, HEAD_DIM>(
        shared_address(&shared.q[stage.index]), args.q_map, q_full, token, it.head, batch,
        sizeof(SecondRows));
    if constexpr (Q_DOT) tma_load_tile<BLOCK_Q, HEAD_DIM>(
        shared_address(&shared.q_dot[stage.index]), args.q_dot_map, q_full, token, it.head, batch);
    tma_load_tile<BLOCK_Q, HEAD_DIM_V>(
        shared_address(&shared.dout[stage.index]), args.dout_map,
        shared_address(&shared.dout_full[stage.index]), token, it.head, batch);
}

// The producer of queries, one thread; it also publishes the work tiles. The next index is
// requested before a tile's last query tile, which hides its latency.
__device__ __forceinline__ void produce_second_queries(
    const Arguments& args, SharedPlan& shared) {
    const Shape& shape = args.arrays.shape;
    const int num_k_tiles = num_key_tiles(args, BLOCK_K);
    PipelineState<STAGES> stage;
    WorkState state;
    for (int index = first_index(args);; ++state.count) {
        WorkTile work = {-1, 0, 0};
        const bool ended = index >= num_k_tiles * shape.num_heads_kv * shape.batch;
        if (!ended) work = tile_at(args, num_k_tiles, index);
        if (!ended && LAST_KEYS_FIRST) work.tile = num_k_tiles - 1 - work.tile;
        publish_work_tile(shared, state, work);
        if (ended) return;
        QueryTileIterator it(args, query_tiles(args, work.tile, NoSequence{}), work);
        for (; it.remaining > 0; it.next(args, work), stage.next()) {
            if (it.remaining == 1) index = next_index(args);
            load_queries(args, shared, stage, work.batch, it);
        }
    }
}

// The producer of K, ddK, V and ddV, one thread.
__device__ __forceinline__ void produce_second_keys(const Arguments& args, SharedPlan& shared) {
    const u32 k_full = shared_address(&shared.k_full), v_full = shared_address(&shared.v_full);
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) return;
        mbarrier_arrive(shared_address(&shared.work_empty[state.stage()]));
        mbarrier_wait(shared_address(&shared.kv_empty), state.kv_phase() ^ 1);
        const int token = work.tile * BLOCK_K, head = work.head, batch = work.batch;
        tma_load_tile<BLOCK_K, HEAD_DIM>(
            shared_address(&shared.k), args.k_map, k_full, token, head, batch);
        if constexpr (K_DOT) tma_load_tile<BLOCK_K, HEAD_DIM>(
            shared_address(&shared.k_dot), args.k_dot_map, k_full, token, head, batch);
        tma_load_tile<BLOCK_K, HEAD_DIM_V>(
            shared_address(&shared.v), args.v_map, v_full, token, head, batch);
        if constexpr (V_DOT) tma_load_tile<BLOCK_K, HEAD_DIM_V>(
            shared_address(&shared.v_dot), args.v_dot_map, v_full, token, head, batch);
    }
}
