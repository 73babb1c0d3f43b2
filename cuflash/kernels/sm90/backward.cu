// Backward attention for 16-bit types on Hopper (sm_90a): dK, dV, and the sums of dQ.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-3 (arXiv:2407.08608). A block stays on its multiprocessor and takes one tile of
// BLOCK_K keys of one key head after another. Warpgroup 0 loads, and adds to dQ. Each of the others
// has 64 keys of the tile, computes S^T and dP^T, of which P^T and dS^T are the A operands of dV
// and dK as they stand in registers, and keeps dK and dV. A step is a query tile that sees the
// keys, of each query head of the group in turn. All warpgroups then share dQ = dS K of the step,
// dS^T coming from shared memory, and each has its part of dQ added in float to a sum in global
// memory, which finish/dq.cu scales and rounds.
//
// The products of a step are issued so that the tensor cores have work while the warps compute:
//
//     tensor cores   S  dP    dV     dQ dK   S' dP' ...
//     warps             P     dS        dQ out   P'
//
// With 128 queries a step, exponentials take as long as two products. dQ then DEFERRED_DQ a step behind
// and follows dV, so that they have company, and a warpgroup may be half a step ahead of the other:
//
//     tensor cores   S  dP    dV dQ-  dK     S' dP' ...
//     warps             P     dS      dQ- out   P'
//
// Grid: as many blocks as multiprocessors, or as key tiles if those are fewer. Tiles are numbered
// by scheduler.cuh, the first keys first: if CAUSAL, most queries see those. A block takes the tile
// of its own number, then whichever is next when it is done (a counter in global memory).
// DETERMINISTIC: all come from the counter, and key tiles add to dQ in the order of their indices.
// If CAUSAL the last keys come first then: their first queries are those that the others come to
// later.
// Block: 1 + CONSUMERS warpgroups.
//
// Constants: Element, CAUSAL, HEAD_DIM and HEAD_DIM_V (64 or 128, the former at least the latter),
// BLOCK_Q, BLOCK_K, STAGES (places for Q and dO), NUM_WARPS and SCORE_WARPS_Q (dq_accum.cuh),
// SHARED_BYTES; TURNS: 0, or CONSUMERS to have the blocks of one head add to a query tile's
// dQ in the order of their key tiles; Arguments and the options (backward_steps.cuh).
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Barriers: *_full, the TMA unit to the math warpgroups: an arrival of a loading thread, and a
// tile's bytes. *_empty, back: an arrival of every math warp. work_full, from the thread that loads
// Q to all others; work_empty, back: an arrival of each warp. ds_full, ds_empty: among the math
// warps, an arrival of each. Named ones: below.
//
// A NaN or an infinity may reach rows that do not see it, as 0 * NaN, work the mask cuts a tile.
// Key tiles with such rows of dK or dV are noted, for finish/dq.cu to compute these once more.
#include "sm90/backward_epilogue.cuh"
#include "sm90/backward_option_scores.cuh"
#include "common/dq_accum.cuh"
constexpr int DK_REGS = HEAD_DIM / 2, DV_REGS = HEAD_DIM_V / 2;
constexpr int DQ_REGS = QueryGrid::N_TILES * 4;
constexpr bool DEFERRED_DQ = BLOCK_Q > 64;
constexpr int BLOCK_THREADS = WARPGROUP + CONSUMER_THREADS;
// ---- The warps that add to dQ, one for each math warpgroup ----

__device__ __forceinline__ void add_dq(const Arguments& args, SharedPlan& shared, int group) {
    const int lane = threadIdx.x % 32;
    const u32 part = shared_address(&shared.staging[group]);
    for_each_iteration(args, shared, [&](int number, int turn, bool others_before) {
        int* turns = dq_semaphores(args, number) + group;
        barrier_sync(DQ_FULL + group, DQ_THREADS);
        if (lane == 0) {
            // Those before are of smaller indices, and taken: the wait ends (next_index).
            if (DETERMINISTIC && others_before) while (load_acquire(turns) != turn) {}
            bulk_reduce_add(dq_sum_tile(args.arrays.dq_sum, number) + group * (DQ_PART_BYTES / 4),
                            part, DQ_PART_BYTES);
            tma_store_commit();
            if (DETERMINISTIC) {
                tma_store_wait<0>();
                __threadfence();
                store_release(turns, turn + 1);
            } else {
                tma_store_wait_read<0>();
            }
        }
        __syncwarp();
        barrier_arrive(DQ_EMPTY + group, DQ_THREADS);
    });
    tma_store_wait<0>();
}

// ---- The warpgroups that compute ----

// A warp's rows of a gradient that are not 16, from the sequence's key `key` on: behind a packed
// sequence's last row comes the next one's first.
__device__ __forceinline__ void compute_all(const Arguments& args, SharedPlan& shared) {
    auto&& shape = own_shape(args);
    // By a shuffle, so that the compiler knows it to be the same in all lanes.
    const int group = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int math_thread = threadIdx.x - WARPGROUP;
    const float scale_log2 = LINEAR ? static_cast<float>(args.arrays.scale) * LOG2_E : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    Dropout<float> dropout(args);

    // The warpgroup's keys, as rows of K and V; its part of dQ, 64 queries and all columns or 64 of
    // them, as panels of dS^T or K.
    constexpr int PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;
    constexpr bool BY_ROWS = BLOCK_Q == CONSUMERS * 64;
    const u32 group_rows = group * 64 * PANEL_ROW_BYTES;
    const u32 dq_part = shared_address(&shared.staging[group]);

    const u32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const u32 dout_full = shared_address(&shared.dout_full);
    const u32 dout_empty = shared_address(&shared.dout_empty);
    const u32 ds_full = shared_address(&shared.ds_full);
    const u32 ds_empty = shared_address(&shared.ds_empty);

    float dk[DK_REGS], dv[DV_REGS];
    u32 ds[S_REGS / 2];                                    // read until the next step
    PipelineState<STAGES> stage;
    PipelineState<2> place;                                 // of dS^T
    for (WorkState state;; ++state.count) {
        mbarrier_wait(shared_address(&shared.work_full[state.stage()]), state.phase());
        const int k_tile = shared.work_tiles[state.stage()].tile;
        if (k_tile < 0) break;
        const int batch = OPTIONS ? shared.work_tiles[state.stage()].batch : 0;
        const auto sequence = sequence_of(shared.work_tiles[state.stage()]);
        set_lengths(shape, sequence);
        set_lengths(mask, sequence);
        const QueryTiles tiles = query_tiles(args, k_tile, sequence);
        const int first_full = tiles.first_full * BLOCK_Q;  // query, of which all see all keys
        const int end_full = WINDOW ? tiles.end_full * BLOCK_Q : shape.seqlen_q;
        const int first_key = k_tile * BLOCK_K + math_thread / 32 * 16 + math_thread % 32 / 4;
        const int first_query[2] = {
            mask.open_first_query(first_key), mask.open_first_query(first_key + 8)};
        const Pairs pair_mask(args, batch);
        dropout.set_sequence(number_of(sequence));
        mbarrier_wait(shared_address(&shared.k_full) + (DOUBLE_BUFFERED_K ? 8 * state.stage() : 0),
             DOUBLE_BUFFERED_K ? state.phase() : state.kv_phase());
        mbarrier_wait(shared_address(&shared.v_full), state.kv_phase());
        bool started = false;                               // dk and dv hold something
        bool sent = false;                                  // a part of dQ

        const auto issue_dq = [&](float (&dq)[DQ_REGS], u32 ds_tile) {
            const u32 own_rows = opaque(group_rows), own_panel = own_rows * (BLOCK_K / 64);
            warpgroup_fence_operand(dq);
            wgmma_fence();
            gemm_atb_ss<Element, BLOCK_K>(
                dq, descriptor(ds_tile + (BY_ROWS ? own_panel : 0), 0),
                descriptor(shared.k_tile(state) + (BY_ROWS ? 0 : own_panel), PANEL_BYTES));
            wgmma_commit();
        };
        // Of the step before. At a tile's first step there is none, and the product is one of K and
        // V, side by side, for nothing: round a branch the compiler runs out of registers.
        const auto issue_last_dq = [&](float (&dq)[DQ_REGS]) {
            const u32 phase = place.index == 0 ? place.phase ^ 1 : place.phase;
            if (started) mbarrier_wait(ds_full + 8 * place.previous(), phase);
            issue_dq(dq, started ? shared_address(&shared.ds[place.previous()])
                                 : shared_address(DOUBLE_BUFFERED_K && state.stage() > 0
                                                  ? static_cast<void*>(&shared.v) : &shared.k));
        };
        const auto send_dq = [&](const float (&dq)[DQ_REGS]) {
            // The first time the place is the warpgroup's own: dK and dV have left.
            if (DOUBLE_BUFFERED_K && !sent) {
                tma_store_wait_read<0>();
                shared.release_previous_k(state, math_thread % 32 == 0);
            }
            barrier_sync((sent ? DQ_EMPTY : CONSUMER_SYNC) + group, sent ? DQ_THREADS : WARPGROUP);
            const u32 dq_of_thread =
                shared_address(&shared.staging) + dq_sum_first(opaque(math_thread)) * 4;
            #pragma unroll
            for (int n = 0; n < DQ_REGS / 4; ++n)
                store_shared_16(dq_of_thread + dq_sum_step(0, n) * 4, dq[n * 4], dq[n * 4 + 1],
                                dq[n * 4 + 2], dq[n * 4 + 3]);
            fence_async_proxy();
            barrier_arrive(DQ_FULL + group, DQ_THREADS);
            sent = true;
        };

        const auto step = [&](bool last) {
            const QueryRows& rows = shared.rows[stage.index];
            // Opaque: what follows from these, kept across the loop, would fill the registers.
            const u32 own_rows = opaque(group_rows);
            const int thread = opaque(math_thread), lane = thread % 32;
            const int first_column = lane % 4 * 2;          // of a score fragment
            const int key_of_lane = k_tile * BLOCK_K + thread / 32 * 16 + lane / 4;
            const u64 k_rows = descriptor(shared.k_tile(state) + own_rows, 0);
            const u64 v_rows = descriptor(shared_address(&shared.v) + own_rows, 0);
            // Columns of B for the scores, rows of B for the gradients.
            const u64 q = descriptor(
                shared_address(&shared.q[stage.index]), BLOCK_Q * PANEL_ROW_BYTES);
            const u64 dout = descriptor(
                shared_address(&shared.dout[stage.index]), BLOCK_Q * PANEL_ROW_BYTES);
            float s[S_REGS], dp[S_REGS], dq[DQ_REGS], derivatives[S_REGS];
            u32 p[S_REGS / 2];

            mbarrier_wait(q_full + 8 * stage.index, stage.phase);
            warpgroup_fence_operand(s);
            wgmma_fence();
            gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM>(s, k_rows, q);
            wgmma_commit();
            wgmma_wait<1>();                                // dK of the last step
            warpgroup_fence_operand(dk);
            mbarrier_arrive_if(started && lane == 0, q_empty + 8 * stage.previous());
            const int q_start = rows.q_start;
            const bool is_cut = q_start < first_full || q_start + BLOCK_Q > end_full;
            const bool has_boundary = SEGMENTS && shared.has_segment_boundary[stage.index];
            const int query = q_start + first_column;       // the lane's first
            LanePairs pairs = {batch, rows.head, query, key_of_lane,
                            query + shape.seqlen_k - shape.seqlen_q - key_of_lane};
            const auto zero_invisible = [&](float (&x)[S_REGS]) {
                if (!VISIBILITY_BITS && is_cut)
                    zero_masked(x, mask, first_query, q_start + first_column);
                // A window's bits, lane by lane. Segments' may be late: to ask them costs as much.
                if (HAS_MASK || (SEGMENTS ? is_cut || has_boundary : pairs.any_masked())) zero_masked(x, pairs);
            };
            mbarrier_wait(dout_full + 8 * stage.index, stage.phase);
            warpgroup_fence_operand(dp);
            wgmma_fence();
            gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM_V>(dp, v_rows, dout);
            wgmma_commit();
            load_biases(pairs, args);
            compute_bits(pairs, args, dropout, pair_mask, mask, rows, is_cut, has_boundary);
            wgmma_wait<1>();                                // S
            warpgroup_fence_operand(s);

            compute_p(s, derivatives, p, rows, first_column, scale_log2, args, pairs, dropout, zero_invisible,
                      is_cut || has_boundary);
            warpgroup_fence_operand(dv);
            wgmma_fence();
            gemm_ab_rs<Element, BLOCK_Q>(dv, p, dout, started);
            wgmma_commit();
            if (DEFERRED_DQ) issue_last_dq(dq);
            wgmma_wait<DEFERRED_DQ ? 2 : 1>();                     // dP
            warpgroup_fence_operand(dp);
            if (DOUBLE_BUFFERED_K && !DEFERRED_DQ)
                mbarrier_arrive_if(last && lane == 0, shared_address(&shared.kv_empty));

            compute_ds(dp, s, p, rows, first_column, pairs, dropout);
            if (MASK_DS) zero_invisible(dp);
            add_dbias(dp, derivatives, args, pairs);
            pack_pairs<Element>(ds, dp);
            if (DEFERRED_DQ) mbarrier_wait(ds_empty + 8 * place.index, place.phase ^ 1);
            const u32 ds_tile = shared_address(&shared.ds[place.index]);
            store_rows<BLOCK_K>(ds_tile, thread / 32 * 16, lane, ds);
            fence_async_proxy();
            __syncwarp();
            mbarrier_arrive_if(lane == 0, ds_full + 8 * place.index);

            if (!DEFERRED_DQ) {
                mbarrier_wait(ds_full + 8 * place.index, place.phase);
                issue_dq(dq, ds_tile);
            }
            warpgroup_fence_operand(dk);
            wgmma_fence();
            gemm_ab_rs<Element, BLOCK_Q>(dk, ds, q, started);
            wgmma_commit();
            wgmma_wait<1>();                                // dV, dQ
            warpgroup_fence_operand(dv);
            warpgroup_fence_operand(dq);
            mbarrier_arrive_if(lane == 0, dout_empty + 8 * stage.index);
            // Not before: a first step's product for nothing reads V, too.
            if (DOUBLE_BUFFERED_K && DEFERRED_DQ)
                mbarrier_arrive_if(last && lane == 0, shared_address(&shared.kv_empty));
            if (DEFERRED_DQ) mbarrier_arrive_if(started && lane == 0, ds_empty + 8 * place.previous());
            if (!DEFERRED_DQ || started) send_dq(dq);

            started = true;
            place.next();
            stage.next();
        };

        for (int left = QueryTileIterator(args, tiles, {k_tile, 0, batch}).remaining; left > 0; --left)
            step(left == 1);

        wgmma_wait<0>();
        warpgroup_fence_operand(dk);
        if (DEFERRED_DQ) {
            float dq[DQ_REGS];
            issue_last_dq(dq);
            wgmma_wait<0>();
            warpgroup_fence_operand(dq);
            mbarrier_arrive_if(threadIdx.x % 32 == 0, ds_empty + 8 * place.previous());
            send_dq(dq);
        }
        state.count = opaque(state.count);
        const int lane = threadIdx.x % 32;
        const WorkTile work = shared.work_tiles[state.stage()];
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.work_empty[state.stage()]));
        mbarrier_arrive_if(lane == 0, q_empty + 8 * stage.previous());
        if (DOUBLE_BUFFERED_K) shared.arrive_k_read(lane == 0);
        else mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
        barrier_sync(DQ_EMPTY + group, DQ_THREADS);
        // dK after dV, through the same place if there is no other.
        constexpr int DV_BYTES = 64 * HEAD_DIM_V * 2, DK_BYTES = 64 * HEAD_DIM * 2;
        constexpr bool SIDE_BY_SIDE = DV_BYTES + DK_BYTES <= DQ_PART_BYTES;
        const int key = work.tile * BLOCK_K + math_thread / 32 * 16;
        const BackwardArguments& arrays = args.arrays;
        bool finite = store_gradient(args.dv_map, work, key, dq_part, dv, 1.0f, arrays.dv,
                               arrays.dv_stride, shape.head_dim_v);
        if (DOUBLE_BUFFERED_K) shared.wait_k_read(state);
        else if (!SIDE_BY_SIDE) tma_store_wait_read<0>();
        __syncwarp();
        const u32 dk_place = DOUBLE_BUFFERED_K ? shared.k_tile(state) + group * DK_BYTES
                                        : dq_part + (SIDE_BY_SIDE ? DV_BYTES : 0);
        finite &= store_gradient(args.dk_map, work, key, dk_place, dk,
                           static_cast<float>(arrays.scale), arrays.dk, arrays.dk_stride,
                           shape.head_dim);
        if (MASKED && !finite) *recompute_flag(args, flag_coord(work)) = 1;
        __syncwarp();
        if (!DOUBLE_BUFFERED_K) tma_store_wait_read<0>();
    }
    if (DOUBLE_BUFFERED_K) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
backward_wgmma(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    constexpr int MATH_WARPS = CONSUMER_THREADS / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.q_full[i]), 1);
            mbarrier_init(shared_address(&shared.q_empty[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.dout_full[i]), 1);
            mbarrier_init(shared_address(&shared.dout_empty[i]), MATH_WARPS);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(shared_address(&shared.ds_full[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.ds_empty[i]), MATH_WARPS);
        }
        for (u64& barrier : shared.k_full) mbarrier_init(shared_address(&barrier), 1);
        mbarrier_init(shared_address(&shared.v_full), 1);
        mbarrier_init(shared_address(&shared.kv_empty), MATH_WARPS);
        for (int i = 0; i < WORK_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.work_full[i]), 1);
            mbarrier_init(shared_address(&shared.work_empty[i]), MATH_WARPS + CONSUMERS + 1);
        }
        shared.init();
        fence_mbarrier_init();
    }
    __syncthreads();

    // 64 K registers: the math warpgroups get what the loading one does not need. (To find tiles
    // with SEGMENTS takes more, which is spilt: the others could not do with less.)
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x < Q_PRODUCER_THREADS) produce_queries(args, shared);
        if (threadIdx.x == WARPGROUP - 32) produce_keys(args, shared);
        if (warp >= 1 && warp <= CONSUMERS) add_dq(args, shared, warp - 1);
    } else {
        warpgroup_reg_alloc<240>();
        compute_all(args, shared);
    }
}
