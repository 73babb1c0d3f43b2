// Score warpgroup of forward_latent.cu: Q, S, the online softmax and P of a part.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/lane_rows.cuh"
#include "decode/latent_shared.cuh"

constexpr int QUERY_BARRIER = 1;                            // of the warpgroup; 0: __syncthreads

struct ScoreWarpgroup {
    const Arguments& args;
    SharedPlan& shared;
    float (&s)[S_COUNT];                                    // not a member: as Fragments
    float m[2], l[2];                                       // of the lane's two rows

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 % ROLE_WARPS * 16, lane_row = warp_row + lane / 4;
    PipelineState<KV_STAGES> stage;

    __device__ __forceinline__ ScoreWarpgroup(
        const Arguments& args, SharedPlan& shared, float (&s)[S_COUNT])
        : args(args), shared(shared), s(s) {}

    __device__ __forceinline__ void compute_part(const Work& work) {
        const Part part = work.part;
        const TileRange tiles = work.tiles;
        const RowTile rows(args, part);
        const LaneRows lane_rows(args, rows, warp_row);
        const Mask<CAUSAL, WINDOW> mask = mask_of(args, part.sequence);
        load_queries(rows);
        m[0] = m[1] = -infinity();
        l[0] = l[1] = 0.0f;
        for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
            gemm_qk();
            float factors[2];
            compute_weights(rows, lane_rows, mask, tile, factors);
            publish(factors, tile + 1 == tiles.end);
        }
    }

private:
    // The first barrier: the warpgroup's GEMMs have read the part before.
    __device__ __forceinline__ void load_queries(const RowTile& rows) {
        barrier_sync(QUERY_BARRIER, WARPGROUP);
        const ForwardArguments& arrays = args.arrays;
        const u16* q = static_cast<const u16*>(arrays.q);
        const int thread = threadIdx.x % WARPGROUP;
        #pragma unroll 1
        for (int row = thread / 8; row < BLOCK_Q; row += WARPGROUP / 8) {
            const bool exists = rows.exists(row);
            const u16* source = q + (exists ? rows.offset(arrays.q_stride, row) : 0);
            #pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                const int column = panel * PANEL_COLUMNS + thread % 8 * CHUNK_ELEMENTS;
                const int columns = exists ? arrays.shape.head_dim - column : 0;
                const int bytes = min(max(columns, 0), CHUNK_ELEMENTS) * 2;
                cp_async_16_partly(
                    shared_address(&shared.q) + tile_offset<BLOCK_Q>(row, column),
                    bytes > 0 ? source + column : q, bytes);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_async_proxy();                                // before wgmma reads
        barrier_sync(QUERY_BARRIER, WARPGROUP);
    }

    // S = Q K^T of the stage's tile, or its negative, a panel at a time as they arrive.
    __device__ __forceinline__ void gemm_qk() {
        const u64 q = descriptor(shared_address(&shared.q), 0);
        const u64 k = descriptor(shared_address(&shared.stages[stage.index].k), 0);
        warpgroup_fence_operand(s);
        #pragma unroll
        for (int n = 0; n < PANELS; ++n) {
            const int panel = panel_at(n);
            mbarrier_wait(barrier_at(shared.full, stage.index * PANELS + panel), stage.phase);
            wgmma_fence();
            gemm_abt_ss<Element, NEGATE_SCORES ? -1 : 1, BLOCK_Q, BLOCK_K, PANEL_COLUMNS>(
                s, advance(q, panel * BLOCK_Q * PANEL_ROW_BYTES), advance(k, panel * PANEL_BYTES),
                n > 0);
            wgmma_commit();
        }
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
    }

    // S becomes P, l is updated. factors: what acc is to be multiplied by.
    template <class Mask>
    __device__ __forceinline__ void compute_weights(
        const RowTile& rows, const LaneRows& lane_rows, const Mask& mask, int tile,
        float (&factors)[2]) {
        auto& scores = reinterpret_cast<float (&)[1][S_COUNT / 4][4]>(s);
        const int first_key = tile * BLOCK_K;
        if constexpr (!LINEAR) lane_rows.apply_score_mod(scores, mask, first_key);
        u32 masked = 0;
        if (rows.is_masked(mask, VisitedTiles{}, tile, first_key, BLOCK_K))
            masked = rows.masked_eights<S_COUNT / 4>(mask, rows.user_mask(args), first_key);
        if (masked != 0)
            lane_rows.apply_mask(scores, mask, first_key, masked, [](int, int, int, bool) {});
        const ScaledExp2 exp{lane_rows.scale_log2};
        float reference[2];
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            reference[half] = raise_max(exp, m[half], l[half], fmaxf(m[half], row_max(s, half)),
                                        [&](float factor) { factors[half] = factor; });
        weigh<S_COUNT>(exp, reference, l, [&](int n) -> float& { return s[n]; });
    }

    // P and the rows' factors, for the value warpgroups. They have released the stage's last P, as
    // the producer has loaded keys there since.
    __device__ __forceinline__ void publish(const float (&factors)[2], bool is_last) {
        u32 packed[P_COUNT];
        pack_pairs<Element>(packed, s);
        if (P_IN_KEYS) barrier_sync(QUERY_BARRIER, WARPGROUP);      // all warps have S
        store_rows<BLOCK_Q>(shared.stages[stage.index].p(), warp_row, lane, packed);
        RowFactors& of_rows = shared.factors[stage.index];
        const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = is_last ? quad_sum(l[half]) : 0.0f;
            if (lane % 4 != 0) continue;
            of_rows.rescale[lane_row + half * 8] = factors[half];
            if (!is_last) continue;
            of_rows.m[lane_row + half * 8] = natural_max(m[half], scale);
            of_rows.l[lane_row + half * 8] = sum;
        }
        fence_async_proxy();
        __syncwarp();
        mbarrier_arrive_if(lane == 0, barrier_at(shared.p_full, stage.index));
    }
};
