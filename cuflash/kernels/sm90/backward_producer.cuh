// Producers of the backward kernels on Hopper: one thread or warp loads Q and dO and publishes the
// work tiles (backward_scheduler.cuh), another thread loads K and V. All loads are TMA copies.
//
// SharedPlan has the tiles v, q[STAGES], dout[STAGES]; rows[STAGES]; has_boundary[...], one flag
// per stage: segment ids or the user's mask hide pairs of the iteration; and barriers. *_full: one
// arrival and the bytes that a copy brings. *_empty: arrivals of the warps that read. K has
// K_STAGES stages; k_tile(state) is the work tile's. With one stage, kv_empty releases K and V.
// With two, kv_empty releases V alone, and wait_k_empty(state) waits for K's stage.
#pragma once
#include "sm90/backward_scheduler.cuh"
#include "sm90/row_stats.cuh"

constexpr int Q_PRODUCER_THREADS = WARP_PRODUCER ? 32 : 1;
constexpr int BOUNDARY_FLAGS = SKIPS_TILES ? STAGES : 1;

template <class Shared>
__device__ __forceinline__ void publish_work_tile(
    Shared& shared, WorkState state, const WorkTile& work) {
    mbarrier_wait(shared_address(&shared.work_empty[state.stage()]), state.phase() ^ 1);
    shared.work_tiles[state.stage()] = work;
    mbarrier_arrive(shared_address(&shared.work_full[state.stage()]));
}

// One iteration's Q, rows and dO.
template <class Shared>
__device__ __forceinline__ void load_query_tile(
    const Arguments& args, Shared& shared, PipelineState<STAGES> stage, const WorkTile& work,
    const QueryTileIterator& it) {
    mbarrier_wait(shared_address(&shared.q_empty[stage.index]), stage.phase ^ 1);
    const u32 q_full = shared_address(&shared.q_full[stage.index]);
    if (SKIPS_TILES)
        shared.has_boundary[stage.index] =
            !pair_mask_of(args, work).sees_all(it.tile, work.tile);
    bulk_load(shared_address(&shared.rows[stage.index]),
              static_cast<const QueryRows*>(args.arrays.delta)
                  + query_tile_index(args, sequence_of(work), work.batch, it.head, it.tile),
              q_full, sizeof(QueryRows));
    // A sequence without queries may start after the array's last token, which is loaded instead.
    const int first_token = sequence_of(work).first_q + it.tile * BLOCK_Q;
    const int token = PACKED ? min(first_token, args.arrays.shape.seqlen_q - 1) : first_token;
    tma_load_tile<BLOCK_Q, HEAD_DIM>(
        shared_address(&shared.q[stage.index]), args.q_map, q_full, token, it.head, work.batch,
        sizeof(QueryRows));
    mbarrier_wait(shared_address(&shared.dout_empty[stage.index]), stage.phase ^ 1);
    tma_load_tile<BLOCK_Q, HEAD_DIM_V>(
        shared_address(&shared.dout[stage.index]), args.dout_map,
        shared_address(&shared.dout_full[stage.index]), token, it.head, work.batch);
}

// The Q producer. WARP_PRODUCER: all lanes search for tiles, one of them loads. The next index is
// requested before a tile's last query tile, which hides its latency.
template <class Shared>
__device__ __forceinline__ void produce_queries(const Arguments& args, Shared& shared) {
    const bool is_elected = !WARP_PRODUCER || threadIdx.x % 32 == 0;
    const int num_k_tiles = num_key_tiles(args, BLOCK_K);
    PipelineState<STAGES> stage;
    WorkState state;
    for (int index = first_index(args, num_k_tiles);; ++state.count) {
        WorkTile packed = {};
        skip_empty_slots(args, index, num_k_tiles, packed);
        const bool ended = index >= num_indices(args, num_k_tiles);
        WorkTile work = {-1, 0, 0};
        if (!ended && PACKED) work = packed;
        if (!ended && !PACKED) set_tile(args, num_k_tiles, index, work);
        if (!ended && LAST_KEYS_FIRST) order_keys(args, num_k_tiles, work);
        if (is_elected) publish_work_tile(shared, state, work);
        if (ended) return;

        QueryTileIterator it(
            args, query_tiles(args, work.tile, sequence_of(work)), work, part_of(work));
        for (; it.remaining > 0; it.next(args, work), stage.next()) {
            if (WARP_PRODUCER) __syncwarp();
            if (!is_elected) continue;
            if (it.remaining == 1) index = index_after(args, index, num_k_tiles);
            load_query_tile(args, shared, stage, work, it);
        }
        if (WARP_PRODUCER) index = __shfl_sync(WHOLE_WARP, index, 0);
    }
}

// The K/V producer, one thread.
template <class Shared>
__device__ __forceinline__ void produce_keys(const Arguments& args, Shared& shared) {
    constexpr bool SHARED_EMPTY = Shared::K_STAGES == 1;    // kv_empty is K's and V's
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) return;
        mbarrier_arrive(shared_address(&shared.work_empty[state.stage()]));
        if constexpr (SHARED_EMPTY)
            mbarrier_wait(shared_address(&shared.kv_empty), state.kv_phase() ^ 1);
        else
            shared.wait_k_empty(state);
        const int token = sequence_of(work).first_k + work.tile * BLOCK_K;
        const int k_stage = SHARED_EMPTY ? 0 : state.stage();
        tma_load_tile<BLOCK_K, HEAD_DIM>(
            shared.k_tile(state), args.k_map, shared_address(&shared.k_full[k_stage]), token,
            work.head, work.batch);
        if (!SHARED_EMPTY) mbarrier_wait(shared_address(&shared.kv_empty), state.kv_phase() ^ 1);
        tma_load_tile<BLOCK_K, HEAD_DIM_V>(
            shared_address(&shared.v), args.v_map, shared_address(&shared.v_full), token,
            work.head, work.batch);
    }
}
