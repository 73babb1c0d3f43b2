// Consumer warpgroups of forward_sm90.cu: 64 rows of the row tile each.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/key_rows.cuh"
#include "decode/lane_rows.cuh"
#include "decode/results.cuh"
#include "decode/sm90_shared.cuh"

// Lives in the kernel, so that the accumulators stay in registers.
struct Fragments {
    float s[S_COUNT], acc[O_COUNT];
    u32 p[P_COUNT];
};

struct Consumer {
    const Arguments& args;
    SharedPlan& shared;
    float (&s)[S_COUNT];                                    // S, then P, of the newest key tile
    float (&acc)[O_COUNT];
    u32 (&p)[P_COUNT];                                      // rounded, of the one before
    float m[2], l[2];                                       // of the lane's two rows

    const int warpgroup = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16 - WARPGROUP / 2;     // in the row tile
    PipelineState<KV_STAGES> k, v;                          // stages of S's tile, of P's

    __device__ __forceinline__ Consumer(
        const Arguments& args, SharedPlan& shared, Fragments& fragments)
        : args(args), shared(shared), s(fragments.s), acc(fragments.acc), p(fragments.p) {}

    // O and lse of the rows over a part of their keys. S of a key tile and P V of the one before
    // are issued together, so that P V runs under the softmax.
    __device__ __forceinline__ void compute_part(const Part& part) {
        const RowTile rows(args, part);
        const LaneRows lane_rows(args, rows, warp_row);
        const Mask<CAUSAL, WINDOW> mask = mask_of(args, part.sequence);
        const VisitedTiles tiles =
            rows.visited(rows.user_mask(args), rows.key_tiles(mask, part));
        const auto is_masked = [&](int tile) {
            return rows.is_masked(mask, tiles, tile, tile * BLOCK_K, BLOCK_K);
        };
        load_queries(rows);
        #pragma unroll
        for (int i = 0; i < O_COUNT; ++i) acc[i] = 0.0f;
        m[0] = m[1] = -infinity();
        l[0] = l[1] = 0.0f;
        if (tiles.first < tiles.end) {
            first_iteration(lane_rows, mask, tiles.first, is_masked(tiles.first), part);
            for (int tile = tiles.first + 1; tile < tiles.end; ++tile)
                iteration(lane_rows, mask, tile, is_masked(tile), part);
            last_gemm_pv();
        }
        griddepcontrol_launch_dependents();                 // of finish/merge_parts.cu
        store(part, rows, lane_rows);
    }

    // Pingpong: one warpgroup at a time issues its GEMMs, then signals the next one.
    __device__ __forceinline__ void scheduler_barrier_sync() {
        barrier_sync(SCHEDULER_BARRIER + warpgroup, SCHEDULER_THREADS);
    }
    __device__ __forceinline__ void scheduler_barrier_arrive() {
        if constexpr (CONSUMER_WARPGROUPS > 1)
            barrier_arrive(SCHEDULER_BARRIER + (warpgroup + 1) % CONSUMER_WARPGROUPS,
                           SCHEDULER_THREADS);
    }

private:
    // ---- Main loop ----

    template <class Mask>
    __device__ __forceinline__ void first_iteration(
        const LaneRows& lane_rows, const Mask& mask, int tile, bool is_masked, const Part& part) {
        wait_for_tile(shared.k_full, k);
        scheduler_barrier_sync();
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk();
        scheduler_barrier_arrive();
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        release(shared.k_empty, k);
        float factors[2];
        compute_weights(lane_rows, mask, tile, is_masked, factors);
        if (is_masked) add_replaced(lane_rows, mask, tile, part);
        v = k;
        k.next();
        pack_pairs<Element>(p, s);
    }

    template <class Mask>
    __device__ __forceinline__ void iteration(
        const LaneRows& lane_rows, const Mask& mask, int tile, bool is_masked, const Part& part) {
        wait_for_tile(shared.k_full, k);
        scheduler_barrier_sync();
        warpgroup_fence_operand(acc);
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_qk();
        wait_for_tile(shared.v_full, v);
        wgmma_fence();
        gemm_pv();
        scheduler_barrier_arrive();
        wgmma_wait<1>();                                    // P V runs on
        warpgroup_fence_operand(s);
        release(shared.k_empty, k);
        float factors[2];
        compute_weights(lane_rows, mask, tile, is_masked, factors);
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
        release(shared.v_empty, v);
        if (__ballot_sync(WHOLE_WARP, factors[0] != 1.0f || factors[1] != 1.0f) != 0)
            #pragma unroll
            for (int i = 0; i < O_COUNT; ++i) acc[i] *= factors[i / 2 % 2];
        if (is_masked) add_replaced(lane_rows, mask, tile, part);
        v = k;
        k.next();
        pack_pairs<Element>(p, s);
    }

    __device__ __forceinline__ void last_gemm_pv() {
        wait_for_tile(shared.v_full, v);
        warpgroup_fence_operand(acc);
        wgmma_fence();
        gemm_pv();
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
        release(shared.v_empty, v);
    }

    __device__ __forceinline__ void gemm_qk() {
        const u32 q_rows = shared_address(&shared.q) + warpgroup * CONSUMER_ROWS * PANEL_ROW_BYTES;
        gemm_abt_ss<Element, NEGATE_SCORES ? -1 : 1, BLOCK_Q, BLOCK_K, HEAD_DIM>(
            s, descriptor(q_rows, 0), descriptor(shared_address(&shared.k[k.index]), 0));
        wgmma_commit();
    }
    __device__ __forceinline__ void gemm_pv() {
        const u32 tile = shared_address(&shared.v[v.index]);
        gemm_ab_rs<Element, BLOCK_K>(acc, p, descriptor(tile, BLOCK_K * PANEL_ROW_BYTES), true);
        wgmma_commit();
    }
    // The fence orders the producer's copies, by the generic proxy, before the reads of wgmma.
    __device__ __forceinline__ void wait_for_tile(
        const u64 (&full)[KV_STAGES], const PipelineState<KV_STAGES>& stage) {
        pipeline_wait(shared_address(&full), stage);
        fence_async_proxy();
    }
    __device__ __forceinline__ void release(
        u64 (&empty)[KV_STAGES], const PipelineState<KV_STAGES>& stage) {
        if (lane == 0) mbarrier_arrive(barrier_at(empty, stage.index));
    }

    // S becomes P, l is updated. factors: what acc is to be multiplied by.
    template <class Mask>
    __device__ __forceinline__ void compute_weights(
        const LaneRows& lane_rows, const Mask& mask, int tile, bool is_masked,
        float (&factors)[2]) {
        auto& scores = reinterpret_cast<float (&)[1][S_COUNT / 4][4]>(s);
        const RowTile& rows = lane_rows.rows;
        const int first_key = tile * BLOCK_K;
        if constexpr (!LINEAR) lane_rows.apply_score_mod(scores, mask, first_key);
        if (is_masked)
            lane_rows.apply_mask(
                scores, mask, first_key,
                rows.masked_eights<S_COUNT / 4>(mask, rows.user_mask(args), first_key),
                [](int, int, int, bool) {});
        const ScaledExp2 exp{lane_rows.scale_log2};
        float reference[2];
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            reference[half] = raise_max(exp, m[half], l[half], fmaxf(m[half], row_max(s, half)),
                                        [&](float factor) { factors[half] = factor; });
        weigh_row<0>(exp, reference[0]);
        weigh_row<1>(exp, reference[1]);
        if constexpr (DROPOUT) lane_rows.apply_dropout(scores, first_key);
    }
    // One of the lane's rows of S becomes P, as weigh() makes it. With a reference that is not
    // large, by fused multiply-adds: they do not round c S, while the reference is c m rounded,
    // so all P of the row are too large by the same factor (excess).
    template <int HALF>
    __device__ __forceinline__ void weigh_row(const ScaledExp2& exp, float reference) {
        float sum = 0.0f;
        const auto for_each = [&](auto weight) {
            #pragma unroll
            for (int i = 0; i < S_COUNT / 2; ++i) {
                float& x = s[i / 2 * 4 + HALF * 2 + i % 2];
                x = weight(x);
                sum += x;
            }
        };
        if (is_small(reference))
            for_each([&](float x) { return exp2_approx(fmaf(x, exp.scale_log2, -reference)); });
        else
            for_each([&](float x) { return exp(x, reference); });
        l[HALF] += sum;
    }
    // So small that the factor is at most 2^(2^-13).
    static __device__ __forceinline__ bool is_small(float reference) {
        return fabsf(reference) < 0x1p12f;
    }
    // The inverse of that factor, for a row's maximum.
    static __device__ __forceinline__ float inverse_excess(float m, float scale_log2) {
        const float reference = finite_reference(m, scale_log2);
        return is_small(reference) ? exp2_approx(fmaf(-m, scale_log2, reference)) : 1.0f;
    }

    // acc += P V of the NaN and infinities of a partly masked tile k of V, which the producer
    // replaced by 0, for rows that see their keys. Reads them from global memory. Slow, rare.
    template <class Mask>
    __device__ __forceinline__ void add_replaced(
        const LaneRows& lane_rows, const Mask& mask, int tile, const Part& part) {
        pipeline_wait(shared_address(&shared.v_full), k);
        const u32 (&replaced)[PRODUCER_WARPS] = shared.replaced[k.index];
        if ((replaced[0] | replaced[1] | replaced[2] | replaced[3]) == 0) return;

        const Pages<Arguments> pages{args, part.sequence.number};
        const KeyRows values(args, args.arrays.v, args.arrays.v_stride, part.sequence,
                             part.kv_head);
        float weights[S_COUNT];                             // in local memory: indexed by key
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) weights[i] = s[i];
        const LaneRows::Row of_lane[2] = {lane_rows.row(0, 0), lane_rows.row(0, 1)};
        const int first_key = tile * BLOCK_K;
        #pragma unroll 1
        for (int i = 0; i < BLOCK_K && first_key + i < part.sequence.seqlen_k; ++i) {
            const int key = first_key + i, page = pages.of_key(key);
            const int owner = lane / 4 * 4 + i % 8 / 2;     // of the quad, has the pair's P
            const u16* row = reinterpret_cast<const u16*>(values.row(max(page, 0), key));
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float weight = __shfl_sync(
                    WHOLE_WARP, weights[i / 8 * 4 + half * 2 + i % 2], owner);
                if (page >= 0 && of_lane[half].sees(mask, key)) add_nonfinite(row, half, weight);
            }
        }
    }
    __device__ __forceinline__ void add_nonfinite(const u16* row, int half, float weight) {
        #pragma unroll
        for (int i = 0; i < O_COUNT; ++i) {
            const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (i / 2 % 2 != half || column >= args.arrays.shape.head_dim_v) continue;
            const float value = to_float(Element{row[column]});
            if (!(fabsf(value) < infinity())) acc[i] += weight * value;
        }
    }

    // ---- Queries and results ----

    // The warp's rows of Q; rows past the last become 0. The first barrier: the warpgroup's GEMMs
    // have read the part before.
    __device__ __forceinline__ void load_queries(const RowTile& rows) {
        barrier_sync(QUERY_BARRIER + warpgroup, WARPGROUP);
        const ForwardArguments& arrays = args.arrays;
        const u16* q = static_cast<const u16*>(arrays.q);
        #pragma unroll 1                                    // runs once: few instructions
        for (int row = warp_row + lane / 8; row < warp_row + 16; row += 4) {
            const bool exists = rows.exists(row);
            const u16* source = q + (exists ? rows.offset(arrays.q_stride, row) : 0);
            #pragma unroll
            for (int panel = 0; panel < num_panels(HEAD_DIM); ++panel) {
                const int column = panel * PANEL_COLUMNS + lane % 8 * CHUNK_ELEMENTS;
                if (HEAD_DIM % PANEL_COLUMNS != 0 && column >= HEAD_DIM) break;
                const int columns = exists ? arrays.shape.head_dim - column : 0;
                const int bytes = min(max(columns, 0), CHUNK_ELEMENTS) * 2;
                cp_async_16_partly(shared_address(&shared.q) + tile_offset<BLOCK_Q>(row, column),
                                   bytes > 0 ? source + column : q, bytes);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_async_proxy();                                // before wgmma reads
        barrier_sync(QUERY_BARRIER + warpgroup, WARPGROUP);
    }

    __device__ __forceinline__ void store(
        const Part& part, const RowTile& rows, const LaneRows& lane_rows) {
        const float factors[2] = {inverse_excess(m[0], lane_rows.scale_log2),
                                  inverse_excess(m[1], lane_rows.scale_log2)};
        const float sums[2] = {quad_sum(l[0]) * factors[0], quad_sum(l[1]) * factors[1]};
        store_row<0>(part, rows, lane_rows.index(0, 0), sums[0], factors[0]);
        store_row<1>(part, rows, lane_rows.index(0, 1), sums[1], factors[1]);
    }
    // The lane's columns of one of its rows, whose weights have this sum, acc times `factor`.
    template <int HALF>
    __device__ __forceinline__ void store_row(
        const Part& part, const RowTile& rows, int row, float sum, float factor) {
        if (!rows.exists(row)) return;
        const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
        const float most = natural_max(m[HALF], scale);
        const Result<float> result(args, part, rows, row, most, sum);
        if (lane % 4 == 0) {
            result.store_lse();
            if (MAX_SCORE) result.store_max_score(most, sum);
        }
        const int head_dim_v = args.arrays.shape.head_dim_v;
        const auto for_each_pair = [&](auto store) {
            #pragma unroll
            for (int i = 0; i < O_COUNT / 4; ++i) {
                const float* pair = &acc[i * 4 + HALF * 2];
                store(i * 8 + lane % 4 * 2, pair[0] * factor, pair[1] * factor);
            }
        };
        if (result.is_part && head_dim_v == HEAD_DIM_V)     // most rows
            for_each_pair([&](int column, float x, float y) { result.store_part(column, x, y); });
        else
            for_each_pair([&](int column, float x, float y) {
                result.store_pair(column, x, y, head_dim_v);
            });
    }
};
