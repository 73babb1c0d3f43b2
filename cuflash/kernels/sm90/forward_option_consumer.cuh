// Consumer warpgroup of forward.cu with options: score modifications, window, segment ids, boolean
// mask, the user's mask, dropout. OptionsConsumer replaces the iterations of Consumer and inherits
// the rest.
#pragma once
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_boolean_mask.cuh"
#include "sm90/forward_user_mask.cuh"

template <bool> struct ScoreOf { using type = PlainScore; };
template <> struct ScoreOf<true> { using type = OffsetScore; };

// Whether the user's score is affine in the key in most tiles.
constexpr bool AFFINE = ScoreExpression<float>::AFFINE;
constexpr bool ROW_OFFSETS = ALIBI_MMA || AFFINE;
constexpr bool MAY_BE_SIMPLE = AFFINE || ScoreExpression<float>::READS;

// Whether a visible pair's score may be -inf.
constexpr bool MAY_BE_HIDDEN = BIAS || SCORE_MOD;

struct OptionsConsumer : Consumer {
    ScoreMod<float> score_mod{args};
    PairMask pairs{args, 0};
    Dropout<float> dropout{args};
    AlibiQueries<ALIBI_MMA> alibi;
    ScoreOf<ROW_OFFSETS>::type score;                       // of the key tile
    bool bias_staged = false;                               // of the key tile
    MaskTile mask_tile;                                     // with HAS_MASK
    UserMaskTile user_mask;                                 // with MASK_MOD
    TileFlags flags{0};                                     // of the key tile, with SPARSE_TILES
    int row_ids[2];                                         // of the lane's rows, with SEGMENTS

    using Consumer::Consumer;

    // ---- Main loop ----

    // A window masks tiles at both ends. With SPARSE_TILES, a tile's flags tell whether it is
    // masked; with MASK_MOD, those of the tile before it tell first.
    __device__ __forceinline__ void main_loop() {
        if constexpr (SPARSE_TILES) {
            for (;;) {
                for (int left = RUN_TILES; !flags.is_last() && (!RUN_TILES || left > 0); --left) {
                    if (!MASK_MOD || flags.next_is_masked()) iteration<true>(0);
                    else iteration<false>(0);
                }
                if (!RUN_TILES || flags.is_last()) break;
                end_run();
            }
        } else if constexpr (MAY_BE_SIMPLE) {
            int tile = visited.num_visited - 2;
            for (;;) {
                const int last = last_of_run(tile, visited.first);
                for (; tile >= last; --tile) {
                    if (visited.full(tile) && is_simple(tile)) iteration<false, true>(tile);
                    else iteration<true>(tile);
                }
                if (!RUN_TILES || tile < visited.first) break;
                end_run();
            }
        } else {
            int tile = visited.num_visited - 2;
            for (; tile >= visited.num_full; --tile) iteration<true>(tile);
            const int first_full = WINDOW ? visited.first_full : 0;
            for (;;) {
                const int last = last_of_run(tile, first_full);
                for (; tile >= last; --tile) iteration<false>(tile);
                if (!RUN_TILES || tile < first_full) break;
                end_run();
            }
            if constexpr (WINDOW)
                for (; tile >= visited.first; --tile) iteration<true>(tile);
        }
    }

    // As Consumer::iteration, but a warp may keep its rows' old maximum, which saves rescaling acc:
    // under a softcap if all its S fit tanh_poly3, otherwise if may_keep_max() holds.
    // SIMPLE: is_simple().
    template <bool IS_MASKED, bool SIMPLE = false>
    __device__ __forceinline__ void iteration(int tile) {
        constexpr bool USES_POLY3 =
            SOFTCAP && !ALIBI && !BIAS && !SCORE_MOD && !IS_MASKED && !MAX_SCORE;
        constexpr bool MAY_KEEP_MAX = USES_POLY3 || (!SOFTCAP && !DROPOUT);
        k = v;
        k.next();
        pipeline_wait(k_full, k);
        tile = acquire_key_tile(tile);
        issue_gemms(tile);
        const u32 ahead = SIMPLE ? read_next_tile(tile - 1) : 0;
        if constexpr (!BIAS_PREFETCH) stage_biases(tile);
        if constexpr (IS_MASKED) load_mask(tile);
        wait_for_qk<1>();
        release_k(is_last(tile));
        bool keeps_max = modify_scores<USES_POLY3, SIMPLE>(tile);
        if constexpr (MAY_KEEP_MAX && !USES_POLY3 && !MAX_SCORE)    // -inf would be too large
            keeps_max = may_keep_max(s, rows, scale_log2, score);
        if constexpr (IS_MASKED) mask_scores(tile);
        if constexpr (MAY_KEEP_MAX && MAX_SCORE)            // of visible pairs
            keeps_max = may_keep_max(s, rows, scale_log2, score);
        // Warps may take different branches, but wgmma.wait_group is .aligned: all warps of a
        // warpgroup must execute the same instance of wait_for_pv. It comes before the branch or,
        // where scores take longest, after it. Otherwise each branch is written out to its end, so
        // that the compiler can schedule the remaining work between the exponentials.
        if constexpr (!MAY_KEEP_MAX) {
            online_softmax<IS_MASKED || MAY_BE_HIDDEN>(s, rows, scale_log2, rescale, score);
            drop(tile);
            wait_for_pv();
            release_v();
            rescale_acc();
            end_iteration();
        } else if constexpr (SOFTCAP || ALIBI) {
            if (!keeps_max) {
                online_softmax<IS_MASKED || MAY_BE_HIDDEN>(s, rows, scale_log2, rescale, score);
            } else {
                if constexpr (USES_POLY3)
                    softmax_with_old_max(s, rows, scale_log2, Poly3Score{score_mod});
                else softmax_with_old_max(s, rows, scale_log2, score);
            }
            drop(tile);
            wait_for_pv();
            release_v();
            if (!keeps_max) rescale_acc();
            end_iteration();
        } else {
            wait_for_pv();
            release_v();
            if (!keeps_max) {
                online_softmax<IS_MASKED || MAY_BE_HIDDEN>(s, rows, scale_log2, rescale, score);
                rescale_acc();
                end_iteration();
            } else {
                softmax_with_old_max(s, rows, scale_log2, score);
                end_iteration();
            }
        }
        use_word(ahead);
    }
    template <bool STORES>
    __device__ __forceinline__ void first_iteration(int slot = -1) {
        k = v;
        k.next();
        if constexpr (!SPARSE_TILES) skip_tiles();
        if constexpr (MASK_MOD) skip_hidden_tiles();
        pipeline_wait(k_full, k);
        const int tile = acquire_key_tile(visited.num_visited - 1);
        scheduler_barrier_sync();
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk(tile);
        scheduler_barrier_arrive();
        if constexpr (STORES) epilogue(slot);
        stage_biases(tile);
        load_mask(tile);
        wait_for_qk<0>();
        release_k(is_last(tile));
        modify_scores<false>(tile);
        mask_scores(tile);
        online_softmax<true>(s, rows, scale_log2, rescale, score);
        drop(tile);
        v = k;
        pack_pairs<Element>(p, s);
    }

    __device__ __forceinline__ void iteration_across_tiles(int slot) {
        k = v;
        k.next();
        if constexpr (!SPARSE_TILES) skip_tiles();
        if constexpr (MASK_MOD) skip_hidden_tiles();
        pipeline_wait(k_full, k);
        const int tile = acquire_key_tile(visited.num_visited - 1);
        issue_gemms(tile);
        stage_biases(tile);
        load_mask(tile);
        wait_for_qk<1>();
        release_k(is_last(tile));
        if constexpr (!SCORE_MOD) modify_scores<false>(tile);
        wait_for_pv();
        release_v();
        epilogue(slot);
        if constexpr (SCORE_MOD) modify_scores<false>(tile);
        mask_scores(tile);
        online_softmax<true>(s, rows, scale_log2, rescale, score);
        drop(tile);
        v = k;
        pack_pairs<Element>(p, s);
    }

    // ---- GEMMs ----

    __device__ __forceinline__ void gemm_qk(int tile) {
        issue_qk();
        alibi.gemm(s, tile * BLOCK_K, shared.alibi_desc());
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_gemms(int tile) {
        scheduler_barrier_sync();
        warpgroup_fence_operand(acc);
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk(tile);
        pipeline_wait(v_full, v);
        wgmma_fence();
        gemm_pv();
        scheduler_barrier_arrive();
    }

    // ---- Query and key tiles ----

    __device__ __forceinline__ bool begin_tile() {
        if (!Consumer::begin_tile()) return false;
        const WorkTile& work = shared.work_tiles[work_slot(q)];
        score_mod.set_head(args, work.batch, work.head);
        score_mod.set_sequence(args, number_of(work), work.head);
        if constexpr (PACKED)
            score_mod.set_user(
                args, number_of(work), work.head, shape.seqlen_q, shape.seqlen_k);
        alibi.set_head(score_mod.slope, score_mod.scale,
                       work.q_start + warpgroup_row + shape.seqlen_k - shape.seqlen_q);
        pairs.set_head(work.head);
        dropout.set_head(work.batch, work.head);
        dropout.set_sequence(number_of(work));
        if constexpr (PAIRWISE) pairs.batch = work.batch;
        if constexpr (HAS_MASK) mask_tile.begin_rows(pairs);
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                row_ids[half] = pairs.id_of_query(min(first_row + half * 8, shape.seqlen_q - 1));
        return true;
    }

    // As skip_tiles(), of the first key tiles of which the warpgroup's rows see nothing.
    __device__ __forceinline__ void skip_hidden_tiles() {
        if constexpr (HIDDEN_GROUPS > 0)
            #pragma unroll 1
            for (int i = 0; i < KV_STAGES - 1; ++i) {
                pipeline_wait(k_full, k);
                const TileFlags own = shared.extras.flags[k.index];
                if (own.is_last() || !own.is_hidden(warpgroup)) return;
                skip_tile();
            }
    }

    // The index of the key tile in stage k, which is full.
    __device__ __forceinline__ int acquire_key_tile(int expected) {
        if constexpr (!SPARSE_TILES) return expected;
        flags = shared.extras.flags[k.index];
        return flags.tile();
    }
    // Whether it is the query tile's last.
    __device__ __forceinline__ bool is_last(int tile) const {
        return SPARSE_TILES ? flags.is_last() : tile == visited.first;
    }

    // ---- Scores ----

    __device__ __forceinline__ void stage_biases(int tile) {
        bias_staged = load_biases(shared, score_mod, shape.seqlen_k, first_row, tile * BLOCK_K);
    }

    __device__ __forceinline__ void load_mask(int tile) {
        if constexpr (HAS_MASK)
            mask_tile.load(pairs, first_row, shape.seqlen_k, tile, tile - 1);
        if constexpr (MASK_MOD)
            if (flags.is_partly())
                user_mask.load(args, shared.work_tiles[work_slot(q)], warp_row, tile);
    }

    // Whether the user's score reads arrays inside alone, or is affine, for all pairs of the
    // warpgroup: the two cases are iterations of their own, as a branch within one would need
    // registers. The first query comes from shared memory for the same reason.
    __device__ __forceinline__ bool is_simple(int tile) const {
        const int first_query = shared.work_tiles[work_slot(q)].q_start + warpgroup_row;
        const int last_query = first_query + CONSUMER_ROWS - 1;
        const int first_key = tile * BLOCK_K, last_key = first_key + BLOCK_K - 1;
        return AFFINE ? is_affine_score(score_mod, first_query, last_query, first_key, last_key)
                      : reads_inside(score_mod, first_query, last_query, first_key, last_key);
    }

    // Of what the warp's 16 rows read of the key tile that comes next.
    __device__ __forceinline__ u32 read_next_tile(int tile) const {
        return read_ahead<BLOCK_K + 16>(score_mod, first_row - lane / 4 + 15, tile * BLOCK_K);
    }

    // S becomes scores. True if it stays S, because all of it fits tanh_poly3 (Poly3Score).
    template <bool USES_POLY3, bool SIMPLE = false>
    __device__ __forceinline__ bool modify_scores(int tile) {
        if constexpr (ROW_OFFSETS) score = {};
        if constexpr (ALIBI_MMA) {
            if (alibi.side != Side::ACROSS) {
                const int past = first_row + shape.seqlen_k - shape.seqlen_q
                               - alibi.nearest_key(tile * BLOCK_K);
                for (int half = 0; half < 2; ++half)
                    score.set(half, score_mod.addend(static_cast<float>(past + half * 8), 0.0f),
                              score_mod.scale);
                return false;
            }
        }
        if constexpr (USES_POLY3)
            if (score_mod.fits_tanh_poly3(s, fminf(rows.max_scaled[0], rows.max_scaled[1])))
                return true;
        if constexpr (AFFINE && SIMPLE) {
            if constexpr (BUILT_IN)
                apply_built_in(
                    s, score_mod, shared, bias_staged, shape.seqlen_k - shape.seqlen_q, first_row,
                    tile * BLOCK_K);
            apply_affine_score(s, score, score_mod, first_row, tile * BLOCK_K);
        } else if constexpr (!LINEAR)
            apply_score_mod<SIMPLE>(
                s, score_mod, shared, bias_staged, shape.seqlen_k - shape.seqlen_q, first_row,
                tile * BLOCK_K);
        if constexpr (BIAS_PREFETCH)
            if (tile > visited.first) stage_biases(tile - 1);
        return false;
    }

    __device__ __forceinline__ void mask_scores(int tile) {
        if constexpr (SEGMENTS)
            if (flags.is_masked())
                apply_segment_mask(s, shared.extras.ids(k), row_ids, flags.has_one_id());
        if constexpr (HAS_MASK) mask_tile.apply(s);
        if constexpr (MASK_MOD)
            if (flags.is_partly()) {
                user_mask.apply(s);
                if (MASK_BITS) return;                      // bits of what the mask leaves
            }
        if (visited.full(tile)) return;
        apply_mask(s, mask, first_row, tile * BLOCK_K);
    }

    __device__ __forceinline__ void drop(int tile) {
        if constexpr (DROPOUT) apply_dropout(s, dropout, first_row, tile * BLOCK_K);
    }
};

template <bool> struct ConsumerOf { using type = Consumer; };
template <> struct ConsumerOf<true> { using type = OptionsConsumer; };
