// Shared memory and producers of sm90/double_backward.cu. All loads are TMA copies.
//
// mbarriers. *_full: an arrival of a producer thread for each copy, and its bytes; pw_full, ds_full
// and t_full, from the scores to the gradients: an arrival of each of a role's warps. *_empty: an
// arrival of each warp of the roles that read last: of q and q_dot of the keys', which wait for
// weights computed from them; of dout of the scores' and keys'; of the weights of the keys' and
// queries'; of K and V of the scores' and queries'. work_*: backward_scheduler.cuh.
//
// Q is the first tile that an iteration reads and the last that it releases, so it has a stage more
// than ddQ, dO and the weights, if it fits.
#pragma once
#include "sm90/backward_producer.cuh"
#include "sm90/second_rows.cuh"

constexpr int ROLE_WARPS = WARPGROUP / 32, SCORE_WARPS = SCORE_WARPGROUPS * ROLE_WARPS;

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot;
    SmemTile<BLOCK_Q, HEAD_DIM> q[Q_STAGES], q_dot[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> pw[STAGES], ds[STAGES], t[STAGES];    // transposed
    SecondRows rows[STAGES];                                // come and go with dO
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], q_dot_full[STAGES], q_dot_empty[STAGES];
    u64 dout_full[STAGES], dout_empty[STAGES], weights_empty[STAGES];
    u64 pw_full[STAGES], ds_full[STAGES], t_full[STAGES];
    u64 k_full, v_full, kv_empty, work_full[WORK_STAGES], work_empty[WORK_STAGES];
    WorkTile work_tiles[WORK_STAGES];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// The stages of an iteration.
struct IterationStage {
    PipelineState<Q_STAGES> q;
    PipelineState<STAGES> others;
    __device__ __forceinline__ void next() {
        q.next();
        others.next();
    }
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_barriers(SharedPlan& shared) {
    for (int i = 0; i < Q_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.q_full[i]), 1);
        mbarrier_init(shared_address(&shared.q_empty[i]), ROLE_WARPS);
    }
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared_address(&shared.q_dot_full[i]), 1);
        mbarrier_init(shared_address(&shared.q_dot_empty[i]), ROLE_WARPS);
        mbarrier_init(shared_address(&shared.dout_full[i]), 1);
        mbarrier_init(shared_address(&shared.dout_empty[i]), SCORE_WARPS + ROLE_WARPS);
        mbarrier_init(shared_address(&shared.weights_empty[i]), 2 * ROLE_WARPS);
        mbarrier_init(shared_address(&shared.pw_full[i]), SCORE_WARPS);
        mbarrier_init(shared_address(&shared.ds_full[i]), SCORE_WARPS);
        mbarrier_init(shared_address(&shared.t_full[i]), SCORE_WARPS);
    }
    mbarrier_init(shared_address(&shared.k_full), 1 + K_DOT);
    mbarrier_init(shared_address(&shared.v_full), 1 + V_DOT);
    mbarrier_init(shared_address(&shared.kv_empty), SCORE_WARPS + ROLE_WARPS);
    for (int i = 0; i < WORK_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.work_full[i]), 1);
        // the three roles, the producer of keys, the semaphore's warp
        mbarrier_init(
            shared_address(&shared.work_empty[i]),
            SCORE_WARPS + 2 * ROLE_WARPS + 1 + DQ_SEMAPHORES);
    }
    fence_mbarrier_init();
}

// One iteration's Q, ddQ, and dO with row statistics, in the order in which they are read.
__device__ __forceinline__ void load_queries(
    const Arguments& args, SharedPlan& shared, const IterationStage& stage, int batch,
    const QueryTileIterator& it) {
    const int i = stage.q.index, n = stage.others.index, token = it.tile * BLOCK_Q;
    const u32 empty_phase = stage.others.phase ^ 1;
    mbarrier_wait(shared_address(&shared.q_empty[i]), stage.q.phase ^ 1);
    tma_load_tile<BLOCK_Q, HEAD_DIM>(
        shared_address(&shared.q[i]), args.q_map, shared_address(&shared.q_full[i]), token, it.head,
        batch);
    if constexpr (Q_DOT) {
        mbarrier_wait(shared_address(&shared.q_dot_empty[n]), empty_phase);
        tma_load_tile<BLOCK_Q, HEAD_DIM>(
            shared_address(&shared.q_dot[n]), args.q_dot_map,
            shared_address(&shared.q_dot_full[n]), token, it.head, batch);
    }
    const u32 dout_full = shared_address(&shared.dout_full[n]);
    mbarrier_wait(shared_address(&shared.dout_empty[n]), empty_phase);
    bulk_load(shared_address(&shared.rows[n]),
              static_cast<const SecondRows*>(args.query_rows)
                  + query_tile_index(args, NoSequence{}, batch, it.head, it.tile),
              dout_full, sizeof(SecondRows));
    tma_load_tile<BLOCK_Q, HEAD_DIM_V>(
        shared_address(&shared.dout[n]), args.dout_map, dout_full, token, it.head, batch,
        sizeof(SecondRows));
}

// The producer of queries, one thread; it also publishes the work tiles. The next index is
// requested before a tile's last query tile, which hides its latency.
__device__ __forceinline__ void produce_second_queries(
    const Arguments& args, SharedPlan& shared) {
    const Shape& shape = args.arrays.shape;
    const int num_k_tiles = num_key_tiles(args, BLOCK_K);
    IterationStage stage;
    WorkState state;
    for (int index = first_index(args);; ++state.count) {
        WorkTile work = {-1, 0, 0};
        const bool ended = index >= num_k_tiles * shape.num_heads_kv * shape.batch;
        if (!ended) work = tile_at(args, num_k_tiles, index);
        if (!ended && LAST_KEYS_FIRST) order_keys(args, num_k_tiles, work);
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
