// P and dS of a tile without options, from the accumulators of S^T and dP^T:
//
//     P = exp(scale S - lse),  dS = P (dP - delta)
//
// A thread's fragment x[S_REGS] of 64 keys by BLOCK_Q queries: x[4 j + 2 h + b] belongs to the
// query 8 j + b after the lane's first one and to the key 8 h after the lane's first one.
#pragma once
#include "sm90/backward_constants.cuh"
#include "sm90/row_stats.cuh"
#include "score/dropout.cuh"
#include "sm90/wgmma.cuh"

// S^T = K Q^T or dP^T = V dO^T over COLUMNS columns: a descriptor of 64 rows of A, one of all of B.
// Issued and committed, not waited for.
template <int COLUMNS>
__device__ __forceinline__ void issue_scores(float (&scores)[S_REGS], u64 a, u64 b) {
    warpgroup_fence_operand(scores);
    wgmma_fence();
    gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, COLUMNS>(scores, a, b);
    wgmma_commit();
}

// Which pairs of a work tile the causal mask or window masks, for a lane.
struct MaskBounds {
    int first_full, end_full;                               // queries between them see all keys
    int first_query[2];                                     // the first to see each of two keys

    // first_key: the lane's first; the second is 8 after it.
    __device__ __forceinline__ MaskBounds(
        const Mask<CAUSAL, WINDOW>& mask, QueryTiles tiles, int first_key)
        : first_full(tiles.first_full * BLOCK_Q),
          end_full(WINDOW ? tiles.end_full * BLOCK_Q : mask.seqlen_q),
          first_query{mask.open_first_query(first_key), mask.open_first_query(first_key + 8)} {}
};

// Whether the causal mask or window masks pairs of a query tile, given that the queries
// [first_full, end_full) see all keys.
__device__ __forceinline__ bool cuts(int first_full, int end_full, int q_start) {
    return q_start < first_full || q_start + BLOCK_Q > end_full;
}

// Zeroes x at masked pairs and past the last query, whatever x was there. query: the lane's first.
// Without a WINDOW: that has visibility bits.
__device__ __forceinline__ void zero_masked(
    float (&x)[S_REGS], const Mask<CAUSAL, WINDOW>& mask, const MaskBounds& bounds, int query) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int first = bounds.first_query[half] - query, end = mask.seqlen_q - query;
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j)
            #pragma unroll
            for (int k = 0; k < 2; ++k)
                if (j * 8 + k < first || j * 8 + k >= end) x[j * 4 + half * 2 + k] = 0.0f;
    }
}

// One statistic of the lane's queries, such as lse. EARLY: load() brings it into registers, before
// MMAs that keep shared memory busy: meanwhile a read takes 200 cycles instead of 30.
template <bool EARLY> struct LaneStatistic {
    static constexpr int PAIRS = S_REGS / 4;                // of adjacent queries, 8 apart
    const float (&rows)[BLOCK_Q];
    const int& first_column;                                // the lane's first query in `rows`
    float loaded[EARLY ? PAIRS : 1][2];

    __device__ __forceinline__ LaneStatistic(
        const float (&rows)[BLOCK_Q], const int& first_column)
        : rows(rows), first_column(first_column) {}
    __device__ __forceinline__ u32 address() const {
        return shared_address(rows) + first_column * 4;
    }
    __device__ __forceinline__ void load() {
        if constexpr (EARLY)
            #pragma unroll
            for (int j = 0; j < PAIRS; ++j)
                load_shared_floats(address() + j * 32, loaded[j][0], loaded[j][1]);
    }
    // Of pair j; from: address().
    __device__ __forceinline__ void read(u32 from, int j, float (&x)[2]) const {
        if constexpr (EARLY) { x[0] = loaded[j][0]; x[1] = loaded[j][1]; }
        else load_shared_floats(from + j * 32, x[0], x[1]);
    }
};

// What the scores of a query tile need of its statistics, for a lane. EARLY: load_lse() reads all
// but delta, so that what follows does not wait for shared memory.
template <bool EARLY = false> struct LaneRows {
    const QueryRows& rows;
    LaneStatistic<EARLY> lse, delta;
    int early_q_start = 0, early_has_large_lse = 0;
    float early_scale = 0.0f;

    __device__ __forceinline__ LaneRows(const QueryRows& rows, const int& first_column)
        : rows(rows), lse(rows.lse, first_column), delta(rows.delta, first_column) {}
    __device__ __forceinline__ void load_lse() {
        if constexpr (EARLY) {
            early_q_start = rows.q_start;
            early_has_large_lse = rows.has_large_lse;
            early_scale = rows.scale;
        }
        lse.load();
    }
    __device__ __forceinline__ int q_start() const {
        return EARLY ? early_q_start : rows.q_start;
    }
    __device__ __forceinline__ bool has_large_lse() const {
        return EARLY ? early_has_large_lse : rows.has_large_lse;
    }
    __device__ __forceinline__ float scale() const { return EARLY ? early_scale : rows.scale; }
    // Of pair j, as LaneStatistic; undefined without rests.
    __device__ __forceinline__ void read_rests(int j, float (&x)[2]) const {
        if constexpr (HAS_LSE_RESTS)
            load_shared_floats(rows.rests_address() + lse.first_column * 4 + j * 32, x[0], x[1]);
    }
};

// S^T becomes P^T = 2^(scale_log2 S^T - lse log2 e).
template <class Rows>
__device__ __forceinline__ void exponentiate(
    float (&s)[S_REGS], const Rows& rows, float scale_log2) {
    const u32 lane_lse = rows.lse.address();
    if (rows.has_large_lse()) {
        const float scale = rows.scale();
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j) {
            float lse[2], rest[2];
            rows.lse.read(lane_lse, j, lse);
            rows.read_rests(j, rest);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = s[j * 4 + i];
                x = HAS_LSE_RESTS ? weight_beside(rest[i % 2], x, lse[i % 2])
                                  : weight(x, scale, lse[i % 2]);
            }
        }
    } else {
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j) {
            float lse[2];
            rows.lse.read(lane_lse, j, lse);
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                s[j * 4 + i] = exp2_approx(fmaf(s[j * 4 + i], scale_log2, -lse[i % 2]));
        }
    }
}

// Element i of P^T: as computed or, if not FLOAT_P, as rounded.
__device__ __forceinline__ float p_element(
    const float (&p)[S_REGS], const u32 (&rounded_p)[S_REGS / 2], int i) {
    const u32 pair = rounded_p[i / 2];
    const float rounded =
        i % 2 == 0 ? to_float(low_half<Element>(pair)) : to_float(high_half<Element>(pair));
    return FLOAT_P ? p[i] : rounded;
}
