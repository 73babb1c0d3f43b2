// Backward attention for 16-bit types on Hopper (sm_90a): dK, dV, and dQ or its sums.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-3 (arXiv:2407.08608). A persistent block, one per SM, takes one work tile after
// another: BLOCK_K keys of one key head (backward_scheduler.cuh). Warpgroup 0, the producer, loads
// tiles and adds dQ to global memory. Each of the others, the consumers, has 64 keys of the tile
// and keeps their dK and dV in registers. An iteration is a query tile that sees the keys, for each
// query head of the group in turn. A consumer computes S^T and dP^T; the registers of P^T and dS^T
// are then the A operands of dV and dK. The consumers divide dQ = dS K, with dS^T from shared
// memory. A writer warp of the producer adds each consumer's part to a float sum in global memory,
// or to an integer one if INTEGER_DQ, which finish/dq.cu scales and rounds. OWNED_DQ: consumers do.
//
//     backward_constants.cuh      constants that follow from the generated ones
//     backward_shared.cuh         SharedPlan, barriers
//     backward_scheduler.cuh      tile scheduler: key tiles of a block, query tiles of a key tile
//     backward_producer.cuh       loads
//     backward_scores.cuh         P and dS without options
//     backward_option_scores.cuh  P and dS with options
//     backward_pair_bits.cuh      masks and dropout as one bit per pair
//     backward_score_mod.cuh      softcap, ALiBi, bias and dbias
//     backward_epilogue.cuh       dK and dV of a work tile
//     backward_parts.cuh          their sums over the parts of a key tile
//     backward_integer_dq.cuh     parts of dQ as integers
//     backward_dq_writers.cuh     the writer warps
//     backward_owned_dq.cuh       dQ of a block that has all keys of a head
//
// The matmuls of an iteration are issued so that the tensor cores have work while warps compute:
//
//     tensor cores   S  dP    dV     dQ dK   S' dP' ...
//     warps             P     dS        dQ out   P'
//
// With 128 queries per iteration, exponentials take as long as two matmuls. Then DEFERRED_DQ: the
// dQ of the previous iteration (dQ-) follows dV, so that both overlap exponentials, and one
// warpgroup may be half an iteration ahead of the other:
//
//     tensor cores   S  dP    dV dQ-  dK     S' dP' ...
//     warps             P     dS      dQ- out   P'
//
// Grid: as many blocks as SMs, or as key tiles if those are fewer. scheduler.cuh numbers the tiles,
// the first keys first: if CAUSAL, most queries see those, so the longest tiles start first.
// DETERMINISTIC: key tiles add to dQ in the order of their indices. If CAUSAL, the last keys then
// come first in all sections but the last (LAST_KEYS_FIRST).
// Block: 1 + CONSUMERS warpgroups.
//
// Constants: Element, CAUSAL, HEAD_DIM and HEAD_DIM_V (32, 64 or 128, the former at least the
// latter), BLOCK_Q, BLOCK_K, STAGES (of Q and dO), NUM_WARPS and SCORE_WARPS_Q (dq_accum.cuh),
// SHARED_BYTES; DQ_SEMAPHORES: 0, or CONSUMERS if DETERMINISTIC; INTEGER_DQ; OWNED_DQ,
// HEADS_INNERMOST, GROUP_PARTS and TAIL_PARTS (backward_scheduler.cuh); PART_SEMAPHORES:
// CONSUMER_WARPS if HAS_PARTS, else 0; SCORE_BENDS: the user's function of scores has a slope other
// than 1; SCORES_TWICE: compute_ds() computes scores again, because their gradients are also added
// to sums of dbias or of the user's arrays, before they are multiplied by slopes, and registers
// hold no more than P; Arguments and the options (docs/guide/options.md).
// Shared memory, barriers, DOUBLE_BUFFERED_K: backward_shared.cuh.
//
// In a partly masked tile a NaN or an infinity may reach rows that do not see it, as 0 * NaN. Key
// tiles with a non-finite dK or dV are flagged, and finish/dq.cu recomputes such rows.
#include "sm90/backward_epilogue.cuh"
#include "sm90/backward_parts.cuh"
#include "sm90/backward_option_scores.cuh"
#include "sm90/backward_dq_writers.cuh"
#include "sm90/backward_owned_dq.cuh"

constexpr int BLOCK_THREADS = WARPGROUP + CONSUMER_THREADS;
constexpr int DK_REGS = HEAD_DIM / 2, DV_REGS = HEAD_DIM_V / 2;
constexpr int DQ_REGS = QueryGrid::N_TILES * 4;
constexpr bool DEFERRED_DQ = BLOCK_Q > 64;
// How consumers divide dQ: 64 queries each, or 64 columns.
constexpr bool DQ_BY_QUERIES = BLOCK_Q == CONSUMERS * 64;
// Whether rows' statistics are read before S is issued: where that was measured to be faster.
constexpr bool EARLY_STATISTICS =
    !DEFERRED_DQ && LINEAR && !SEGMENTS && !HAS_MASK && !DROPOUT;

// An SM has 64 K registers: the consumers get those that the producer does not need. Where tiles
// are skipped, the producer's search needs more than 24 and spills; the consumers can spare none.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

static_assert(DQ_SEMAPHORES == 0 || DQ_SEMAPHORES == CONSUMERS, "each warpgroup adds a part of dQ");
static_assert(CONSUMER_THREADS == THREADS, "the plan's warps are the consumers");
static_assert(CONSUMERS == 2, "registers suffice for two consumers");
static_assert(QueryGrid::M_TILES == 1 && QueryGrid::WARP_COLUMNS <= 64,
              "a warpgroup's part of dQ is 64 queries and at most 64 columns");
static_assert(HEAD_DIM_V <= HEAD_DIM && DQ_PART_BYTES >= gradient_bytes(HEAD_DIM),
              "64 rows of dK or dV leave through the staging buffer of a part of dQ");

// ---- Matmuls of a consumer warpgroup: issued and committed, not waited for ----

// dV += P^T dO or dK += dS^T Q, from registers; = if not `accumulate`.
template <int COUNT>
__device__ __forceinline__ void issue_gradient(
    float (&gradient)[COUNT], const u32 (&a)[S_REGS / 2], u64 b, bool accumulate) {
    warpgroup_fence_operand(gradient);
    wgmma_fence();
    gemm_ab_rs<Element, BLOCK_Q>(gradient, a, b, accumulate);
    wgmma_commit();
}

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

// DEFERRED_DQ: the dQ of the previous iteration. A work tile's first iteration (not `started`) has
// none, but a branch around the MMAs would make ptxas run out of registers. So they read K and V,
// which are adjacent and together at least as large as dS^T, instead of dS^T; the result is
// discarded.
struct IssuePreviousDq {
    SharedPlan& shared;
    const WorkState& state;
    const PipelineState<2>& ds_stage;
    const bool& started;
    const IssueDq& issue_dq;

    __device__ __forceinline__ void operator()(float (&dq)[DQ_REGS]) const {
        const u32 phase = ds_stage.index == 0 ? ds_stage.phase ^ 1 : ds_stage.phase;
        if (started) mbarrier_wait(barrier_at(shared.ds_full, ds_stage.previous()), phase);
        issue_dq(dq, started ? shared_address(&shared.ds[ds_stage.previous()])
                             : shared_address(DOUBLE_BUFFERED_K && state.stage() > 0
                                              ? static_cast<void*>(&shared.v) : &shared.k));
    }
};

// ---- What a consumer warpgroup puts into shared memory ----

// A warp's 16 rows of rounded dS^T, for the dQ of all consumers.
__device__ __forceinline__ void publish_ds(
    SharedPlan& shared, PipelineState<2> ds_stage, const u32 (&ds)[S_REGS / 2], int warp_row,
    int lane) {
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
    if (DOUBLE_BUFFERED_K && !staged) {
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

// The same, OWNED_DQ; q_start: the first query of the part's tile.
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

// The epilogue of a work tile. dV is stored through the staging buffer, dK after it: through K's
// stage if K has two, otherwise through the rest of the staging buffer or, if both do not fit,
// through the same bytes once dV has been read.
__device__ __forceinline__ void store_gradients(
    const Arguments& args, SharedPlan& shared, WorkState state, PipelineState<STAGES> stage,
    int warpgroup, int thread, const Shape& shape, float (&dk)[DK_REGS], float (&dv)[DV_REGS]) {
    constexpr int DV_BYTES = gradient_bytes(HEAD_DIM_V), DK_BYTES = gradient_bytes(HEAD_DIM);
    constexpr bool BOTH_FIT = DV_BYTES + DK_BYTES <= DQ_PART_BYTES;
    const BackwardArguments& arrays = args.arrays;
    const int lane = threadIdx.x % 32;
    const WorkTile work = shared.work_tiles[state.stage()];
    __syncwarp();
    release_work_tile(shared, state, lane == 0);
    mbarrier_arrive_if(lane == 0, barrier_at(shared.q_empty, stage.previous()));
    if (DOUBLE_BUFFERED_K) shared.arrive_k_read(lane == 0);
    else mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
    barrier_sync(DQ_EMPTY + warpgroup, DQ_THREADS);

    // A branch around all that follows instead made kernels spill.
    const bool are_stored = sum_parts(args, work, dk, dv);
    const int key = work.tile * BLOCK_K + thread / 32 * 16;
    const u32 staging = shared_address(&shared.staging[warpgroup]);
    bool finite = store_gradient(args.dv_map, work, key, staging, dv, 1.0f, arrays.dv,
                                 arrays.dv_stride, shape.head_dim_v, are_stored);
    if (DOUBLE_BUFFERED_K) shared.wait_k_read(state);
    else if (!BOTH_FIT) tma_store_wait_read<0>();
    __syncwarp();
    const u32 dk_tile = DOUBLE_BUFFERED_K ? shared.k_tile(state) + warpgroup * DK_BYTES
                                          : staging + (BOTH_FIT ? DV_BYTES : 0);
    finite &= store_gradient(args.dk_map, work, key, dk_tile, dk, static_cast<float>(arrays.scale),
                             arrays.dk, arrays.dk_stride, shape.head_dim, are_stored);
    if (MASKED && !finite && are_stored) *recompute_flag(args, flag_coord(work)) = 1;
    __syncwarp();
    if (!DOUBLE_BUFFERED_K) tma_store_wait_read<0>();
}

// ---- A consumer warpgroup ----

// An iteration of a work tile. Its members are the variables of consume(): with the registers in a
// struct, instead of references to them, kernels were up to 7 % slower (docs/lab/sm90_backward.md).
struct Iterate {
    const Arguments& args;
    const Shape& shape;
    const Mask<CAUSAL, WINDOW>& mask;
    const MaskBounds& bounds;
    const PairMask& pair_mask;
    const Dropout<float>& dropout;
    const float& scale_log2;
    const int &warpgroup, &consumer_thread;
    const u32& key_rows;
    SharedPlan& shared;
    const WorkState& state;
    const int &k_tile, &batch;
    float (&dk)[DK_REGS];
    float (&dv)[DV_REGS];
    u32 (&ds)[S_REGS / 2];
    PipelineState<STAGES>& stage;
    PipelineState<2>& ds_stage;
    bool &started, &staged;
    u32& lane_grid;
    const IssueDq& issue_dq;
    const IssuePreviousDq& issue_previous_dq;

    // This iteration's dQ or, DEFERRED_DQ, the previous one's, which a first iteration has not.
    __device__ __forceinline__ void pass_dq(float (&dq)[DQ_REGS], const QueryRows& rows) const {
        if (OWNED_DQ) {
            if (!DEFERRED_DQ || started)
                pass_owned_dq(args, shared, state, dq, rows.q_start - (DEFERRED_DQ ? BLOCK_Q : 0),
                              k_tile, warpgroup, consumer_thread);
            else
                give_staging(shared, state, warpgroup);
        } else if (!DEFERRED_DQ)
            stage_dq(shared, state, dq, RowPair(rows, consumer_thread), warpgroup, consumer_thread,
                     staged);
        else if (started)
            stage_dq(shared, state, dq, RowPair(lane_grid, opaque(consumer_thread) % 32),
                     warpgroup, consumer_thread, staged);
    }

    __device__ __forceinline__ void operator()(bool last) const {
        const QueryRows& rows = shared.rows[stage.index];
        // opaque(): the compiler would otherwise keep addresses that follow from these in registers
        // across iterations.
        const u32 keys = opaque(key_rows);
        const int thread = opaque(consumer_thread), lane = thread % 32;
        const int first_column = lane % 4 * 2;              // the lane's first query in `rows`
        const int lane_key = k_tile * BLOCK_K + thread / 32 * 16 + lane / 4;
        const u64 k = descriptor(shared.k_tile(state) + keys, 0);
        const u64 v = descriptor(shared_address(&shared.v) + keys, 0);
        // Columns of B in S and dP, rows of B in dK and dV.
        const u64 q = descriptor(
            shared_address(&shared.q[stage.index]), BLOCK_Q * PANEL_ROW_BYTES);
        const u64 dout = descriptor(
            shared_address(&shared.dout[stage.index]), BLOCK_Q * PANEL_ROW_BYTES);
        float s[S_REGS], dp[S_REGS], dq[DQ_REGS], derivatives[S_REGS];
        u32 p[S_REGS / 2];
        mbarrier_wait(barrier_at(shared.q_full, stage.index), stage.phase);
        LaneRows<EARLY_STATISTICS> lane_rows(rows, first_column);
        lane_rows.load_lse();
        issue_scores<HEAD_DIM>(s, k, q);
        wgmma_wait<1>();                                    // dK of the previous iteration
        warpgroup_fence_operand(dk);
        mbarrier_arrive_if(started && lane == 0, barrier_at(shared.q_empty, stage.previous()));
        const int q_start = lane_rows.q_start();
        const bool is_cut = cuts(bounds.first_full, bounds.end_full, q_start);
        const bool has_boundary = SKIPS_TILES && shared.has_boundary[stage.index];
        const int query = q_start + first_column;           // the lane's first
        LanePairs pairs = {batch, rows.head, query, lane_key,
                           query + shape.seqlen_k - shape.seqlen_q - lane_key,
                           shape.seqlen_q, shape.seqlen_k};
        const ZeroMasked<true> zero_masked{
            mask, bounds, pairs, q_start, first_column, is_cut, has_boundary};
        const u32 ahead = read_tile(pairs, args);
        mbarrier_wait(barrier_at(shared.dout_full, stage.index), stage.phase);
        issue_scores<HEAD_DIM_V>(dp, v, dout);
        load_biases(pairs, args);
        compute_bits(pairs, args, dropout, pair_mask, mask, rows, is_cut, has_boundary);
        wgmma_wait<1>();                                    // S
        warpgroup_fence_operand(s);
        use_word(ahead);
        compute_p(s, derivatives, p, lane_rows, scale_log2, args, pairs, dropout, zero_masked,
                  is_cut || has_boundary);
        lane_rows.delta.load();
        issue_gradient(dv, p, dout, started);
        if (DEFERRED_DQ) issue_previous_dq(dq);
        wgmma_wait<DEFERRED_DQ ? 2 : 1>();                  // dP
        warpgroup_fence_operand(dp);
        if (DOUBLE_BUFFERED_K && !DEFERRED_DQ)
            mbarrier_arrive_if(last && lane == 0, shared_address(&shared.kv_empty));

        compute_ds(ds, dp, derivatives, s, p, lane_rows, args, pairs, dropout, zero_masked);
        drop_overflowing_rows(args, shared.work_tiles[state.stage()], rows, ds, first_column);
        publish_ds(shared, ds_stage, ds, thread / 32 * 16, lane);
        if (!DEFERRED_DQ) {
            mbarrier_wait(barrier_at(shared.ds_full, ds_stage.index), ds_stage.phase);
            issue_dq(dq, shared_address(&shared.ds[ds_stage.index]));
        }
        issue_gradient(dk, ds, q, started);
        wgmma_wait<1>();                                    // dV, dQ
        warpgroup_fence_operand(dv);
        warpgroup_fence_operand(dq);
        mbarrier_arrive_if(lane == 0, barrier_at(shared.dout_empty, stage.index));
        // Not earlier: the discarded dQ of a first iteration reads V.
        if (DOUBLE_BUFFERED_K && DEFERRED_DQ)
            mbarrier_arrive_if(last && lane == 0, shared_address(&shared.kv_empty));
        if (DEFERRED_DQ)
            mbarrier_arrive_if(
                started && lane == 0, barrier_at(shared.ds_empty, ds_stage.previous()));
        pass_dq(dq, rows);
        if (DEFERRED_DQ) lane_grid = lane_grid_of(rows, consumer_thread);

        started = true;
        ds_stage.next();
        stage.next();
    }
};

__device__ __forceinline__ void consume(const Arguments& args, SharedPlan& shared) {
    auto&& shape = tile_shape(args);
    // The shuffle tells the compiler that the value is uniform across a warp.
    const int warpgroup = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int consumer_thread = threadIdx.x - WARPGROUP;
    const u32 key_rows = warpgroup * 64 * PANEL_ROW_BYTES;  // of the 64 keys in a panel, bytes
    const float scale_log2 = LINEAR ? static_cast<float>(args.arrays.scale) * LOG2_E : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    Dropout<float> dropout(args);

    float dk[DK_REGS], dv[DV_REGS];
    u32 ds[S_REGS / 2];                                     // read until the next iteration
    PipelineState<STAGES> stage;                            // of Q and dO
    PipelineState<2> ds_stage;
    for (WorkState state;; ++state.count) {
        const WorkTile& work = acquire_work_tile(shared, state);
        const int k_tile = work.tile;
        if (k_tile < 0) break;
        const auto sequence = sequence_of(work);
        const int batch = !OPTIONS ? 0 : PACKED ? number_of(sequence) : work.batch;
        set_lengths(shape, sequence);
        set_lengths(mask, sequence);
        const QueryTiles tiles = query_tiles(args, k_tile, sequence);
        const MaskBounds bounds(
            mask, tiles, k_tile * BLOCK_K + consumer_thread / 32 * 16 + consumer_thread % 32 / 4);
        const PairMask pair_mask(args, batch);
        dropout.set_sequence(number_of(sequence));
        mbarrier_wait(shared_address(&shared.k_full) + (DOUBLE_BUFFERED_K ? 8 * state.stage() : 0),
                      DOUBLE_BUFFERED_K ? state.phase() : state.kv_phase());
        mbarrier_wait(shared_address(&shared.v_full), state.kv_phase());
        bool started = false;                               // dk and dv hold a sum
        bool staged = false;                                // a part of this tile's dQ
        u32 lane_grid = 0;                                  // of the dQ to be staged next
        const IssueDq issue_dq{shared, state, key_rows};
        const IssuePreviousDq issue_previous_dq{shared, state, ds_stage, started, issue_dq};
        const Iterate iterate{
            .args = args, .shape = shape, .mask = mask, .bounds = bounds, .pair_mask = pair_mask,
            .dropout = dropout, .scale_log2 = scale_log2, .warpgroup = warpgroup,
            .consumer_thread = consumer_thread, .key_rows = key_rows, .shared = shared,
            .state = state, .k_tile = k_tile, .batch = batch, .dk = dk, .dv = dv, .ds = ds,
            .stage = stage, .ds_stage = ds_stage, .started = started, .staged = staged,
            .lane_grid = lane_grid, .issue_dq = issue_dq, .issue_previous_dq = issue_previous_dq};

        const int head = MASK_MOD ? work.head : 0;          // read where tiles depend on it
        int remaining =
            QueryTileIterator(args, tiles, {k_tile, head, batch}, part_of(work)).remaining;
        if (OWNED_DQ && !DEFERRED_DQ) give_staging(shared, state, warpgroup);
        for (; remaining > 0; --remaining) iterate(remaining == 1);

        wgmma_wait<0>();
        warpgroup_fence_operand(dk);
        if (DEFERRED_DQ) {
            float dq[DQ_REGS];
            issue_previous_dq(dq);
            wgmma_wait<0>();
            warpgroup_fence_operand(dq);
            mbarrier_arrive_if(
                threadIdx.x % 32 == 0, barrier_at(shared.ds_empty, ds_stage.previous()));
            if (OWNED_DQ)
                pass_owned_dq(args, shared, state, dq, shared.rows[stage.previous()].q_start,
                              k_tile, warpgroup, consumer_thread);
            else
                stage_dq(shared, state, dq, RowPair(lane_grid, threadIdx.x % 32), warpgroup,
                         consumer_thread, staged);
        }
        state.count = opaque(state.count);
        store_gradients(args, shared, state, stage, warpgroup, consumer_thread, shape, dk, dv);
    }
    if (DOUBLE_BUFFERED_K) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
backward_sm90(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();

    const int warp = threadIdx.x / 32;
    if (threadIdx.x < WARPGROUP) {                          // producers
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x < Q_PRODUCER_THREADS) produce_queries(args, shared);
        if (threadIdx.x == WARPGROUP - 32) produce_keys(args, shared);
        if (warp >= 1 && warp <= CONSUMERS) {
            if constexpr (OWNED_DQ) keep_owned_dq(args, shared, warp - 1);
            else if constexpr (INTEGER_DQ) add_integer_dq(args, shared, warp - 1);
            else add_dq(args, shared, warp - 1);
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(args, shared);
    }
}
