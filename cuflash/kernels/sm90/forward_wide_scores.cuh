// The score warpgroup of forward_wide.cu: S, the online softmax, P and lse of 64 queries.
#pragma once
#include "sm90/forward_boolean_mask.cuh"
#include "sm90/forward_epilogue.cuh"
#include "sm90/forward_scheduler.cuh"
#include "sm90/forward_scores.cuh"
#include "sm90/forward_user_mask.cuh"
#include "sm90/forward_wide_shared.cuh"

// A thread's share of the matrices; not members of ScoreWarpgroup, as in forward_consumer.cuh.
struct ScoreFragments {
    float s[S_COUNT], rescale[2];
    RowState rows = empty_rows();
};

struct ScoreWarpgroup {
    // A weight above 1 (may_keep_max) times a dropout's factor may overflow float16.
    static constexpr bool MAY_KEEP_MAX = !DROPOUT;
    // Whether a visible pair's score may be -inf.
    static constexpr bool MAY_BE_HIDDEN = BIAS || SCORE_MOD;

    const Arguments& args;
    SharedPlan& shared;
    float (&s)[S_COUNT];
    float (&rescale)[2];
    RowState& rows;

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 % ROLE_WARPS * 16, lane_row = warp_row + lane / 4;
    const float scale_log2 = exponent_scale<LINEAR>(args.arrays.scale);

    ScoreMod<float> score_mod{args};
    Dropout<float> dropout{args};
    PairMask pairs{args, 0};
    MaskTile mask_tile;                                     // with HAS_MASK
    UserMaskTile user_mask;                                 // with MASK_MOD
    int row_ids[2];                                         // of the lane's rows, with SEGMENTS
    PipelineState<1> q;
    KeyRing::State k;
    PipelineState<P_STAGES> p;

    // The query tile.
    decltype(tile_shape(args)) shape = tile_shape(args);
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    int first_row;                                          // the lane's first query
    KeyTiles visited;

    __device__ __forceinline__ ScoreWarpgroup(
        const Arguments& args, SharedPlan& shared, ScoreFragments& fragments)
        : args(args), shared(shared), s(fragments.s), rescale(fragments.rescale),
          rows(fragments.rows) {}

    // Waits for the next query tile; false after the last.
    __device__ __forceinline__ bool begin_tile() {
        pipeline_wait(shared_address(shared.q_full), q);
        const WorkTile& work = shared.work_tiles[work_slot(q)];
        if (work.num_rows == 0) return false;
        first_row = work.q_start + lane_row;
        set_lengths(shape, work);
        set_lengths(mask, work);
        visited = key_tiles(mask, work.q_start, work.num_rows);
        rows = empty_rows();
        score_mod.set_head(args, work.batch, work.head);
        score_mod.set_sequence(args, number_of(work), work.head);
        if constexpr (PACKED)
            score_mod.set_user(
                args, number_of(work), work.head, shape.seqlen_q, shape.seqlen_k);
        dropout.set_head(work.batch, work.head);
        dropout.set_sequence(number_of(work));
        pairs.set_head(work.head);
        if constexpr (PAIRWISE) pairs.batch = work.batch;
        if constexpr (HAS_MASK) mask_tile.begin_rows(pairs);
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                row_ids[half] = pairs.id_of_query(min(first_row + half * 8, shape.seqlen_q - 1));
        return true;
    }

    // The key tiles of the query tile, from the last to the first.
    __device__ __forceinline__ void main_loop() {
        const int first_full = WINDOW ? visited.first_full : 0;
        const int end_full = PAIRWISE ? visited.first : max(visited.num_full, visited.first);
        int tile = visited.num_visited - 1;
        for (; tile >= end_full; --tile) iteration<true>(tile);
        if constexpr (!PAIRWISE)
            for (; tile >= first_full; --tile) iteration<false>(tile);
        if constexpr (WINDOW && !PAIRWISE)
            for (; tile >= visited.first; --tile) iteration<true>(tile);
    }

    template <bool IS_MASKED> __device__ __forceinline__ void iteration(int tile) {
        const bool is_last = tile == visited.first;
        if constexpr (HAS_MASK)
            mask_tile.load(pairs, first_row, shape.seqlen_k, tile, tile - 1);
        if constexpr (MASK_MOD)
            user_mask.load(args, shared.work_tiles[work_slot(q)], warp_row, tile);
        gemm_by_chunks<Element, NEGATE_SCORES ? -1 : 1, HEAD_DIM, sum_chunk(HEAD_DIM)>(
            s, shared_address(&shared.q), shared.k, shared.k_barriers, k, lane);
        if (is_last) mbarrier_arrive_if(lane == 0, shared_address(shared.q_empty));
        if constexpr (!LINEAR)
            apply_score_mod<false>(s, score_mod, shared, false, shape.seqlen_k - shape.seqlen_q,
                                   first_row, tile * BLOCK_K);
        bool keeps_max = false;
        if constexpr (MAY_KEEP_MAX && !MAX_SCORE)
            keeps_max = may_keep_max(s, rows, scale_log2, PlainScore{});
        if constexpr (IS_MASKED) mask_scores(tile);
        if constexpr (MAY_KEEP_MAX && MAX_SCORE)            // of visible pairs
            keeps_max = may_keep_max(s, rows, scale_log2, PlainScore{});
        if (keeps_max) {
            softmax_with_old_max(s, rows, scale_log2, PlainScore{});
            rescale[0] = rescale[1] = 1.0f;
        } else {
            online_softmax<IS_MASKED || MAY_BE_HIDDEN>(s, rows, scale_log2, rescale);
        }
        if constexpr (DROPOUT) apply_dropout(s, dropout, first_row, tile * BLOCK_K);
        publish(is_last);
    }

    __device__ __forceinline__ void mask_scores(int tile) {
        mask_other_segments(tile);
        if constexpr (HAS_MASK) mask_tile.apply(s);
        if constexpr (MASK_MOD) user_mask.apply(s);
        if (!PAIRWISE || !visited.full(tile)) apply_mask(s, mask, first_row, tile * BLOCK_K);
    }
    // Reads the keys' segment ids, unless the query tile and the key tile have one and the same.
    __device__ __forceinline__ void mask_other_segments(int tile) {
        if constexpr (SEGMENTS) {
            const IdRange of_keys = pairs.ids_of_keys(tile);
            const IdRange of_queries =
                pairs.ids_of_queries(shared.work_tiles[work_slot(q)].q_start / BLOCK_Q);
            if (of_keys.low == of_keys.high && of_queries.low == of_queries.high
                && of_keys.low == of_queries.low) return;
            #pragma unroll
            for (int i = 0; i < S_COUNT / 2; ++i) {
                const int key = lane_key(tile * BLOCK_K) + i / 2 * 8 + i % 2;
                const int id = pairs.id_of_key(min(key, shape.seqlen_k - 1));
                #pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (id != row_ids[half]) s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
            }
        }
    }

    // P and the rows' factors, for the value warpgroups; with a query tile's last key tile also the
    // rows' results.
    __device__ __forceinline__ void publish(bool is_last) {
        u32 packed[P_COUNT];
        pack_pairs<Element>(packed, s);
        mbarrier_wait(barrier_at(shared.p_empty, p.index), p.phase ^ 1);
        store_rows<BLOCK_Q>(shared_address(&shared.p[p.index]), warp_row, lane, packed);
        RowFactors& factors = shared.factors[p.index];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (lane % 4 != 0) continue;
            factors.rescale[lane_row + half * 8] = rescale[half];
            factors.set_max_scaled(lane_row + half * 8, rows.max_scaled[half]);
        }
        if (is_last) finish_rows(factors);
        fence_async_proxy();
        __syncwarp();
        mbarrier_arrive_if(lane == 0, barrier_at(shared.p_full, p.index));
        p.next();
    }

    // lse and max_score, and what acc is multiplied by. NaN for rows that need recompute_row: all
    // of O is then NaN.
    __device__ __forceinline__ void finish_rows(RowFactors& factors) const {
        const QueryTile tile = shared.work_tiles[work_slot(q)];
        float* lse = lse_of(args.arrays, tile);
        const int head = PACKED && is_none(args, tile) ? NO_HEAD : tile.head;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float m = MAX_SCORE ? quad_max(rows.max[half]) : rows.max[half];
            const float l = quad_sum(rows.sum[half]), reference = rows.max_scaled[half];
            const RowResult result =
                finish_row(args, m, l, excess_of(m, scale_log2, reference), head);
            const bool exact =
                l < infinity() && fabsf(finite_max_scaled(m, scale_log2, reference)) < 0x1p24f;
            if (lane % 4 != 0) continue;
            const int row = lane_row + half * 8;
            factors.inverse[row] = exact ? result.inverse : quiet_nan();
            if (lse != nullptr && row < tile.num_rows) lse[row] = result.lse;
            if (MAX_SCORE && row < tile.num_rows)
                max_score_of(args, tile)[row] = max_score_of_row(natural_max(args, m), l);
        }
    }
};

__device__ __forceinline__ void compute_scores(const Arguments& args, SharedPlan& shared) {
    ScoreFragments fragments;
    ScoreWarpgroup scores(args, shared, fragments);
    while (scores.begin_tile()) {
        scores.main_loop();
        scores.q.next();
    }
}
