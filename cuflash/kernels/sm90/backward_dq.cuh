// dQ of an iteration of sm90/backward.cu, by its consumers: dS^T goes to shared memory for both,
// then comes the matmul, and what becomes of each one's part.
//
// CARRIED_DQ (DEFERRED_DQ, K in two stages, no options): the dQ of a work tile's last iteration is
// computed in the next work tile's first one, as those before are in the iteration that follows.
// There the tensor cores would have nothing to do meanwhile.
#pragma once
#include "sm90/backward_dq_writers.cuh"
#include "sm90/backward_owned_dq.cuh"

constexpr int DQ_REGS = QueryGrid::N_TILES * 4;
// How consumers divide dQ: 64 queries each, or 64 columns.
constexpr bool DQ_BY_QUERIES = BLOCK_Q == CONSUMERS * 64;

static_assert(QueryGrid::M_TILES == 1 && QueryGrid::WARP_COLUMNS <= 64,
              "a warpgroup's part of dQ is 64 queries and at most 64 columns");
static_assert(!CARRIED_DQ || (DEFERRED_DQ && DOUBLE_BUFFERED_K && !DETERMINISTIC && !INTEGER_DQ
                              && !PACKED), "a part is pending between work tiles");
static_assert(!OWNED_DQ || CARRIED_DQ == DEFERRED_DQ, "the writer warp counts on it");

// The warpgroup's part of dQ = dS K: 64 queries and all columns, or all 64 queries and 64 columns.
struct IssueDq {
    SharedPlan& shared;
    const WorkState& state;
    const u32& key_rows;                                    // as in consume()

    __device__ __forceinline__ void operator()(float (&dq)[DQ_REGS], u32 ds_tile) const {
        constexpr int PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;
        const u32 panel = opaque(key_rows) * (BLOCK_K / 64);
        const u64 ds = descriptor(ds_tile + (DQ_BY_QUERIES ? panel : 0), 0);
        const u64 k = descriptor(shared.k_tile(state) + (DQ_BY_QUERIES ? 0 : panel), PANEL_BYTES);
        warpgroup_fence_operand(dq);
        wgmma_fence();
        gemm_atb_ss<Element, BLOCK_K>(dq, ds, k);
        wgmma_commit();
    }
};

// The work tile of the previous iteration, if its dQ is computed in this one.
__device__ __forceinline__ WorkState of_pending_dq(WorkState state, bool started) {
    return {CARRIED_DQ && !started ? state.count - 1 : state.count};
}

// DEFERRED_DQ: the dQ of the previous iteration. A work tile's first iteration (not `started`) has
// none, but a branch around the MMAs would make ptxas run out of registers. So they read K and V,
// which are adjacent and together at least as large as dS^T, instead of dS^T; the result is
// discarded.
struct IssuePreviousDq {
    SharedPlan& shared;
    const WorkState& state;
    const PipelineState<2>& ds_stage;
    const bool &pending, &started;
    const IssueDq& issue_dq;

    __device__ __forceinline__ void operator()(float (&dq)[DQ_REGS]) const {
        const u32 phase = ds_stage.index == 0 ? ds_stage.phase ^ 1 : ds_stage.phase;
        if (pending) mbarrier_wait(barrier_at(shared.ds_full, ds_stage.previous()), phase);
        const u32 ds = pending ? shared_address(&shared.ds[ds_stage.previous()])
                               : shared_address(DOUBLE_BUFFERED_K && state.stage() > 0
                                                ? static_cast<void*>(&shared.v) : &shared.k);
        if constexpr (CARRIED_DQ) {
            const WorkState of_dq = pending ? of_pending_dq(state, started) : state;
            IssueDq{shared, of_dq, issue_dq.key_rows}(dq, ds);
        } else {
            issue_dq(dq, ds);
        }
    }
};

// A warp's 16 rows of rounded dS^T, for the dQ of all consumers.
__device__ __forceinline__ void publish_ds(
    SharedPlan& shared, PipelineState<2> ds_stage, const u32 (&ds)[S_REGS / 2], int warp_row,
    int lane, bool started) {
    if (CARRIED_DQ && !started) {                           // dV and dK of the work tile before
        tma_store_wait_read<0>();
        __syncwarp();
    }
    if (DEFERRED_DQ) mbarrier_wait(barrier_at(shared.ds_empty, ds_stage.index), ds_stage.phase ^ 1);
    store_rows<BLOCK_K>(shared_address(&shared.ds[ds_stage.index]), warp_row, lane, ds);
    fence_async_proxy();
    __syncwarp();
    mbarrier_arrive_if(lane == 0, barrier_at(shared.ds_full, ds_stage.index));
}

// The warpgroup's part of dQ, for its writer warp. `staged`: not the first of the work tile. Before
// the first, the warpgroup owns the staging buffer, and TMA stores of the previous work tile's dV
// or dK may still read it.
__device__ __forceinline__ void stage_dq(
    SharedPlan& shared, WorkState state, const float (&dq)[DQ_REGS], const RowPair& grids,
    int warpgroup, int thread, bool& staged) {
    if (DOUBLE_BUFFERED_K && !CARRIED_DQ && !staged) {
        tma_store_wait_read<0>();
        shared.release_previous_k(state, thread % 32 == 0);
    }
    barrier_sync((staged ? DQ_EMPTY : CONSUMER_SYNC) + warpgroup, staged ? DQ_THREADS : WARPGROUP);
    const u32 target = shared_address(&shared.staging) + dq_sum_first(opaque(thread)) * 4;
    if constexpr (INTEGER_DQ) {
        stage_limb<false>(target, dq, grids);
        if (grids.are_wide()) {
            fence_async_proxy();
            barrier_arrive(DQ_FULL + warpgroup, DQ_THREADS);
            barrier_sync(DQ_EMPTY + warpgroup, DQ_THREADS);
            stage_limb<true>(target, dq, grids);
        }
    } else {
        #pragma unroll
        for (int n = 0; n < DQ_REGS / 4; ++n)
            store_shared_16(target + dq_sum_step(0, n) * 4, dq[n * 4], dq[n * 4 + 1],
                            dq[n * 4 + 2], dq[n * 4 + 3]);
    }
    fence_async_proxy();
    barrier_arrive(DQ_FULL + warpgroup, DQ_THREADS);
    staged = true;
}

// The same, OWNED_DQ; k_tile, q_start: the first key tile of the part, the query of its tile.
__device__ __forceinline__ void pass_owned_dq(
    const Arguments& args, SharedPlan& shared, WorkState state, float (&dq)[DQ_REGS],
    int q_start, int k_tile, int warpgroup, int thread) {
    barrier_sync(DQ_EMPTY + warpgroup, DQ_THREADS);
    const u32 staging = shared_address(&shared.staging) + dq_sum_first(opaque(thread)) * 4;
    if (k_tile > 0)
        #pragma unroll
        for (int n = 0; n < DQ_REGS / 4; ++n)
            store_shared_16(staging + dq_sum_step(0, n) * 4, dq[n * 4], dq[n * 4 + 1],
                            dq[n * 4 + 2], dq[n * 4 + 3]);
    else
        finish_owned_dq<DQ_BY_QUERIES>(
            args, shared.work_tiles[state.stage()], dq, staging, q_start, warpgroup,
            opaque(thread) % WARPGROUP);
    fence_async_proxy();
    barrier_arrive(DQ_FULL + warpgroup, DQ_THREADS);
}

// The same, CARRIED_DQ, of the previous iteration; before_start: the first query of its tile.
__device__ __forceinline__ void pass_pending_dq(
    const Arguments& args, SharedPlan& shared, WorkState state, float (&dq)[DQ_REGS],
    int before_start, bool started, bool pending, int k_tile, int warpgroup, int thread,
    bool& staged) {
    if (pending && !OWNED_DQ)
        stage_dq(shared, state, dq, RowPair(0, 0), warpgroup, thread, staged);
    if (pending && OWNED_DQ) {
        const WorkState of_dq = of_pending_dq(state, started);
        const int last_start = (num_query_tiles(args, BLOCK_Q) - 1) * BLOCK_Q;
        pass_owned_dq(args, shared, of_dq, dq, started ? before_start : last_start,
                      started ? k_tile : shared.work_tiles[of_dq.stage()].tile, warpgroup, thread);
    }
    if (started || state.count == 0) return;
    __syncwarp();
    if (OWNED_DQ) release_work_tile(shared, {state.count - 1}, threadIdx.x % 32 == 0);
    shared.release_previous_k(state, threadIdx.x % 32 == 0);
}

// CARRIED_DQ: the last one of the block. `state`: after its last work tile.
__device__ __forceinline__ void finish_pending_dq(
    const Arguments& args, SharedPlan& shared, WorkState state, PipelineState<2> ds_stage,
    const u32& key_rows, int warpgroup, int thread, bool& staged) {
    float dq[DQ_REGS];
    const bool pending = true, started = false;
    const IssueDq issue_dq{shared, state, key_rows};
    IssuePreviousDq{shared, state, ds_stage, pending, started, issue_dq}(dq);
    wgmma_wait<0>();
    warpgroup_fence_operand(dq);
    pass_pending_dq(args, shared, state, dq, 0, started, pending, 0, warpgroup, thread, staged);
    if (!OWNED_DQ) barrier_sync(DQ_EMPTY + warpgroup, DQ_THREADS);
}
