// Consumer warpgroup of forward.cu, without options: 64 queries of each query tile.
//
// Consumer::iteration is the main loop's body. It issues S = Q K^T of its key tile and acc += P V
// of the previous one, then runs the softmax of S while P V is still being computed. `k` is the
// pipeline state of S's key tile; `v`, that of P's, is one tile behind.
#pragma once
#include "common/long_sums.cuh"
#include "sm90/forward_recompute.cuh"
#include "sm90/forward_scores.cuh"
#include "sm90/forward_shared.cuh"

constexpr int SIGN_OF_S = NEGATE_SCORES ? -1 : 1;

// S = Q K^T, with Q_REGISTER_STEPS k-steps of Q (16 columns each) in registers where these have
// room. From shared memory Q is read again for each key tile: at head_dim 256, a quarter of what
// S's MMAs and those of P V read. One step less where the additions of runs need registers.
constexpr int Q_REGISTER_STEPS =
    OPTIONS || SINK || HEAD_DIM != 256 || HEAD_DIM_V != 256 || BLOCK_K > 80 ? 0
    : RUN_TILES ? 5 : 6;
template <int STEPS> struct QueryFragments { u32 q[4 * STEPS]; };
template <> struct QueryFragments<0> {};
template <int STEPS> struct HeldQueries {
    u32 (&q_columns)[4 * STEPS];
    explicit __device__ __forceinline__ HeldQueries(QueryFragments<STEPS>& own)
        : q_columns(own.q) {}
    // From a stage of Q, at whose row `rows` the warp's begin.
    __device__ __forceinline__ void load_columns(u32 rows) {
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 fragment[4];
            ldmatrix_x4(fragment, rows + tile_offset<BLOCK_Q>(
                threadIdx.x % 16, step * WGMMA_K + threadIdx.x % 32 / 16 * CHUNK_ELEMENTS));
            #pragma unroll
            for (int i = 0; i < 4; ++i) q_columns[4 * step + i] = fragment[i];
        }
    }
    __device__ __forceinline__ void gemm(float (&s)[S_COUNT], u64 queries, u64 keys) const {
        gemm_abt_rs<Element, SIGN_OF_S, BLOCK_Q, BLOCK_K, HEAD_DIM>(s, q_columns, queries, keys);
    }
};
template <> struct HeldQueries<0> {
    explicit __device__ __forceinline__ HeldQueries(QueryFragments<0>&) {}
    __device__ __forceinline__ void load_columns(u32) {}
    __device__ __forceinline__ void gemm(float (&s)[S_COUNT], u64 queries, u64 keys) const {
        gemm_abt_ss<Element, SIGN_OF_S, BLOCK_Q, BLOCK_K, HEAD_DIM>(s, queries, keys);
    }
};

// A thread's share of the matrices. Not members of Consumer: the compiler would then keep its
// scalars in local memory until it has unrolled the loops over these arrays.
struct Fragments : QueryFragments<Q_REGISTER_STEPS> {
    float s[S_COUNT], acc[O_COUNT], rescale[2];
    u32 p[P_COUNT];
    RowState rows = empty_rows();
};

struct Consumer : HeldQueries<Q_REGISTER_STEPS> {
    const Arguments& args;
    SharedPlan& shared;
    float (&s)[S_COUNT];
    float (&acc)[O_COUNT];
    float (&rescale)[2];
    u32 (&p)[P_COUNT];
    RowState& rows;

    // The shuffle tells the compiler that the value is uniform across a warp, so that it computes
    // descriptors once per warp and holds them in uniform registers.
    const int warpgroup =
        __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int lane = threadIdx.x % 32, warpgroup_row = warpgroup * CONSUMER_ROWS;
    const int warp_row = (threadIdx.x / 32 - 4) * 16, lane_row = warp_row + lane / 4;
    const float scale_log2 = exponent_scale<LINEAR>(args.arrays.scale);

    const u64 q_desc = descriptor(
        shared_address(&shared.q_then_out) + warpgroup_row * PANEL_ROW_BYTES, 0);
    const u64 k_desc = descriptor(shared_address(&shared.k), 0);
    const u64 v_desc = descriptor(shared_address(&shared.v), BLOCK_K * PANEL_ROW_BYTES);
    const u32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const u32 k_full = shared_address(&shared.k_full), k_empty = shared_address(&shared.k_empty);
    const u32 v_full = shared_address(&shared.v_full), v_empty = shared_address(&shared.v_empty);

    LongSums<O_COUNT, 2> long_sums;
    bool accumulates = false;                               // false: P V overwrites acc
    bool exact = true;                                      // no row so far needs recompute_row
    PipelineState<Q_STAGES> q;
    PipelineState<KV_STAGES> k, v{KV_STAGES - 1, 1};
    int stored_stage = -1;                                  // of Q, with a TMA store in flight

    // The query tile: the lane's first query, and the key tiles that the warpgroup visits.
    decltype(tile_shape(args)) shape = tile_shape(args);
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    int first_row, num_skipped;
    KeyTiles visited;

    __device__ __forceinline__ Consumer(
        const Arguments& args, SharedPlan& shared, Fragments& fragments)
        : HeldQueries<Q_REGISTER_STEPS>(fragments), args(args), shared(shared), s(fragments.s),
          acc(fragments.acc), rescale(fragments.rescale), p(fragments.p), rows(fragments.rows) {}

    // ---- Main loop ----

    // The key tiles of a query tile, from the last but one (first_iteration() or
    // iteration_across_tiles() computed S of the last) to the first: 0, or the first of a part
    // (written out, as a function would change plain machine code). Tiles from num_full on are
    // partly masked: few, which lengthen the first run.
    __device__ __forceinline__ void main_loop() {
        int tile = visited.num_visited - 2;
        for (; tile >= visited.num_full; --tile) iteration<true>(tile);
        for (;;) {
            const int last = last_of_run(tile, KEY_PARTS ? visited.first : 0);
            for (; tile >= last; --tile) iteration<false>(tile);
            if (!RUN_TILES || tile < (KEY_PARTS ? visited.first : 0)) break;
            end_run();
        }
    }
    // Between runs. The compiler would otherwise compute Q's descriptors before the first run and
    // hold them in registers, for which the main loop has no room.
    __device__ __forceinline__ void end_run() {
        long_sums.add([this](int i) -> float& { return acc[i]; }, rows.max_scaled);
        accumulates = false;
        q.index = opaque(q.index);
    }

    // S of key tile `tile`, acc += P V of the previous one; then P of `tile`. In a tile that is not
    // masked, a warp may keep its rows' old maximum, which saves rescaling acc. Each branch is
    // written out to its end, so that the compiler can schedule the rest between the exponentials;
    // the wait for P V comes before, because all warps must execute the same instance of it.
    template <bool IS_MASKED>
    __device__ __forceinline__ void iteration(int tile) {
        k = v;
        k.next();
        pipeline_wait(k_full, k);
        scheduler_barrier_sync();
        warpgroup_fence_operand(acc);
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk();
        pipeline_wait(v_full, v);
        wgmma_fence();
        gemm_pv();
        scheduler_barrier_arrive();
        wait_for_qk<1>();                                   // P V runs on
        release_k(tile == (KEY_PARTS ? visited.first : 0));
        bool keeps_max = false;
        if constexpr (IS_MASKED) mask_scores(tile);
        else keeps_max = may_keep_max(s, rows, scale_log2, PlainScore{});
        if constexpr (IS_MASKED) online_softmax<true>(s, rows, scale_log2, rescale);
        wait_for_pv();
        release_v();
        if (keeps_max) {
            softmax_with_old_max(s, rows, scale_log2, PlainScore{});
            end_iteration();
        } else {
            if constexpr (!IS_MASKED) online_softmax<false>(s, rows, scale_log2, rescale);
            rescale_acc();
            end_iteration();
        }
    }
    __device__ __forceinline__ void end_iteration() {
        release_q();
        v = k;
        pack_pairs<Element>(p, s);
    }

    // The first S of a query tile, alone. STORES: meanwhile, stores the rows of the query tile in
    // work slot `slot`.
    template <bool STORES>
    __device__ __forceinline__ void first_iteration(int slot = -1) {
        k = v;
        k.next();
        skip_tiles();
        const int tile = visited.num_visited - 1;
        pipeline_wait(k_full, k);
        scheduler_barrier_sync();
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk();
        scheduler_barrier_arrive();
        if constexpr (STORES) epilogue(slot);
        wait_for_qk<0>();
        release_k(tile == (KEY_PARTS ? visited.first : 0));
        mask_scores(tile);
        online_softmax<true>(s, rows, scale_log2, rescale);
        v = k;
        pack_pairs<Element>(p, s);
    }

    // The first S of a query tile together with the last P V of the one in work slot `slot`, whose
    // rows are then stored: the pipeline does not drain between query tiles.
    __device__ __forceinline__ void iteration_across_tiles(int slot) {
        k = v;
        k.next();
        skip_tiles();
        const int tile = visited.num_visited - 1;
        pipeline_wait(k_full, k);
        scheduler_barrier_sync();
        warpgroup_fence_operand(acc);
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk();
        pipeline_wait(v_full, v);
        wgmma_fence();
        gemm_pv();
        scheduler_barrier_arrive();
        wait_for_qk<1>();
        release_k(tile == (KEY_PARTS ? visited.first : 0));
        wait_for_pv();
        release_v();
        epilogue(slot);
        mask_scores(tile);
        online_softmax<true>(s, rows, scale_log2, rescale);
        v = k;
        pack_pairs<Element>(p, s);
    }

    // The last P V of a query tile, alone.
    __device__ __forceinline__ void last_gemm_pv() {
        pipeline_wait(v_full, v);
        warpgroup_fence_operand(acc);
        wgmma_fence();
        gemm_pv();
        wait_for_pv();
        release_v();
    }

    // ---- GEMMs ----

    // S = Q K^T, asynchronously.
    __device__ __forceinline__ void gemm_qk() {
        issue_qk();
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_qk() {
        HeldQueries::gemm(
            s, advance(q_desc, q.index * static_cast<int>(sizeof(shared.q_then_out[0]))),
            advance(k_desc, k.index * static_cast<int>(sizeof(shared.k[0]))));
    }

    // acc += P V, asynchronously.
    __device__ __forceinline__ void gemm_pv() {
        gemm_ab_rs<Element, BLOCK_K>(
            acc, p, advance(v_desc, v.index * static_cast<int>(sizeof(shared.v[0]))), accumulates);
        wgmma_commit();
        accumulates = true;
    }

    // Pingpong: one warpgroup at a time issues its GEMMs, then signals the next one. A single one
    // only waits for all its warps.
    __device__ __forceinline__ void scheduler_barrier_sync() {
        barrier_sync(SCHEDULER_BARRIER + warpgroup, SCHEDULER_THREADS);
    }
    __device__ __forceinline__ void scheduler_barrier_arrive() {
        if constexpr (CONSUMER_WARPGROUPS > 1)
            barrier_arrive(SCHEDULER_BARRIER + (warpgroup + 1) % CONSUMER_WARPGROUPS,
                           SCHEDULER_THREADS);
    }

    // PENDING: the number of later GEMMs that may still run.
    template <int PENDING> __device__ __forceinline__ void wait_for_qk() {
        wgmma_wait<PENDING>();
        warpgroup_fence_operand(s);
    }
    __device__ __forceinline__ void wait_for_pv() {
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
    }

    __device__ __forceinline__ void rescale_acc() {
        #pragma unroll
        for (int i = 0; i < O_COUNT; ++i) acc[i] *= rescale[i / 2 % 2];
    }

    __device__ __forceinline__ void mask_scores(int tile) {
        if (tile < visited.num_full) return;
        apply_mask(s, mask, first_row, tile * BLOCK_K);
    }

    // ---- Stages ----

    // With one stage of Q, it is released after the query tile's last S.
    __device__ __forceinline__ void release_k(bool is_last_tile) {
        if (lane == 0) mbarrier_arrive(k_empty + 8 * k.index);
        if (Q_STAGES == 1 && is_last_tile && lane == 0) mbarrier_arrive(q_empty);
    }
    __device__ __forceinline__ void release_v() {
        if (lane == 0) mbarrier_arrive(v_empty + 8 * v.index);
    }

    // Releases the stage of Q that a TMA store reads, an iteration after the store was issued: the
    // wait for the read is then short.
    __device__ __forceinline__ void release_q() {
        if (stored_stage >= 0 && lane == 0) {
            tma_store_wait_read<0>();
            mbarrier_arrive(q_empty + 8 * stored_stage);
        }
        stored_stage = -1;
    }

    // ---- Query tiles ----

    // Waits for the next query tile; false after the last.
    //
    // The producer loads every key tile that any consumer of the block sees. This one skips the
    // tiles after its own last one, num_skipped of them: at most KV_STAGES - 1, because it waits
    // for them while it still holds the stage of P's key tile. It computes the others, fully
    // masked.
    __device__ __forceinline__ bool begin_tile() {
        pipeline_wait(q_full, q);
        const WorkTile& work = shared.work_tiles[work_slot(q)];
        if (work.num_rows == 0) return false;
        load_columns(shared.q_stage(q.index) + warp_row * PANEL_ROW_BYTES);
        first_row = work.q_start + lane_row;
        set_lengths(shape, work);
        set_lengths(mask, work);
        visited = key_tiles(mask, work.q_start + warpgroup_row, CONSUMER_ROWS);
        // Visits down to the block's first tile, which other warpgroups may see.
        if constexpr (WINDOW) visited.first = first_key_tile(mask, work.q_start);
        if (warpgroup_row >= work.num_rows) visited.num_visited = visited.first + 1;
        if constexpr (KEY_PARTS) {
            visited.first = work.first;
            visited.num_visited = work.num_visited;
        }
        num_skipped = min(work.num_visited - visited.num_visited, KV_STAGES - 1);
        visited.num_visited = work.num_visited - num_skipped;
        return true;
    }

    // V is released without a warp sync: lanes leave the scheduler barrier together, wait as one.
    // One that falls behind would have to miss a whole refill of the stage to wait for a wrong
    // phase: lane 0 releases nothing more before the next scheduler barrier, which waits for it.
    __device__ __forceinline__ void skip_tiles() {
        for (int i = 0; i < num_skipped; ++i) {
            pipeline_wait(k_full, k);
            skip_tile();
        }
    }
    // Tile k, whose K is there.
    __device__ __forceinline__ void skip_tile() {
        scheduler_barrier_sync();
        scheduler_barrier_arrive();
        if (lane == 0) mbarrier_arrive(k_empty + 8 * k.index);
        pipeline_wait(v_full, k);
        if (lane == 0) mbarrier_arrive(v_empty + 8 * k.index);
        k.next();
    }

    // Stores O and lse of the query tile in work slot `slot`: O through its stage of Q, or, if
    // there is only one stage, which is being refilled, from registers.
    __device__ __forceinline__ void epilogue(int slot) {
        const QueryTile tile = shared.work_tiles[slot];
        const ForwardArguments& arrays = args.arrays;
        if constexpr (KEY_PARTS)
            if (const int part_slot = shared.work_tiles[slot].slot; part_slot >= 0) {
                store_part(tile, memory_of_slot(args, part_slot));
                if constexpr (Q_STAGES > 1) stored_stage = slot;
                accumulates = false;
                rows = empty_rows();
                return;
            }
        long_sums.finish([this](int i) -> float& { return acc[i]; }, rows.max_scaled);
        exact &= normalise(args, acc, rows, scale_log2, lane_row, tile, lse_of(arrays, tile));
        if constexpr (Q_STAGES > 1) {
            const u32 stage = shared_address(&shared.q_then_out)
                            + slot * static_cast<int>(sizeof(shared.q_then_out[0]));
            store_through(stage, tile);
            stored_stage = slot;
        } else {
            const i64 stride = arrays.out_stride.token;
            store_to_array(out_of(arrays, tile) + lane_row * stride, stride, acc, lane_row,
                           tile.num_rows, shape.head_dim_v);
        }
        accumulates = false;
        rows = empty_rows();
    }

    // Stores O, m and l of a part. Rows that forward_merge.cu has to recompute begin with a NaN.
    __device__ __forceinline__ void store_part(const QueryTile& tile, float* slot) {
        normalise(args, acc, rows, scale_log2, lane_row, tile, nullptr);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane_row + half * 8;
            const float m = rows.max[half], l = quad_sum(rows.sum[half]);
            if (lane % 4 == 0)
                rows_of_slot(slot)[row] =
                    {m, l / excess_of(m, scale_log2, rows.max_scaled[half])};
            #pragma unroll
            for (int j = 0; j < O_COUNT / 4; ++j)
                reinterpret_cast<ColumnPair*>(slot + row * HEAD_DIM_V)[j * 4 + lane % 4] =
                    {acc[j * 4 + half * 2], acc[j * 4 + half * 2 + 1]};
        }
        __syncwarp();
    }

    // Stores the warp's rows of O through a stage of Q: by TMA, or by the warp itself if its 16
    // rows reach into the next packed sequence.
    __device__ __forceinline__ void store_through(u32 stage, const QueryTile& tile) {
        stage_rows(stage + warp_row * PANEL_ROW_BYTES, acc);
        fence_async_proxy();
        __syncwarp();
        const bool ends_sequence = PACKED && tile.num_rows < warp_row + 16;
        if (ends_sequence) {
            const i64 stride = args.arrays.out_stride.token;
            store_tile<16, HEAD_DIM_V, 32, BLOCK_Q>(
                stage, warp_row,
                reinterpret_cast<u16*>(out_of(args.arrays, tile) + warp_row * stride),
                stride, tile.num_rows - warp_row, shape.head_dim_v, true, lane);
            __syncwarp();
        }
        if (lane == 0 && !ends_sequence && warp_row < tile.num_rows) {
            #pragma unroll
            for (int panel = 0; panel < num_panels(HEAD_DIM_V); ++panel)
                tma_store(args.out_map, stage + (panel * BLOCK_Q + warp_row) * PANEL_ROW_BYTES,
                          panel * PANEL_COLUMNS, tile.first_q + tile.q_start + warp_row,
                          tile.head, tile.batch);
            tma_store_commit();
        }
    }
};
