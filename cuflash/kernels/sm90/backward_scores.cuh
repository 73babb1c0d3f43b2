// P and dS of a tile without options, from the accumulators of S^T and dP^T:
//
//     P = exp(scale S - lse),  dS = P (dP - delta)
//
// A thread's fragment x[S_REGS] of 64 keys by BLOCK_Q queries: x[4 j + 2 h + b] belongs to the
// query 8 j + b after the lane's first one and to the key 8 h after the lane's first one.
//
// Constants: those of backward_constants.cuh.
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

// S^T becomes P^T = 2^(scale_log2 S^T - lse log2 e). first_column: the lane's first query in rows.
__device__ __forceinline__ void exponentiate(
    float (&s)[S_REGS], const QueryRows& rows, int first_column, float scale_log2) {
    const u32 lane_lse = shared_address(rows.lse) + first_column * 4;
    if (rows.has_large_lse) {
        const float scale = rows.scale;
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j) {
            float lse[2];
            load_shared_floats(lane_lse + j * 32, lse[0], lse[1]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) s[j * 4 + i] = weight(s[j * 4 + i], scale, lse[i % 2]);
        }
    } else {
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j) {
            float lse[2];
            load_shared_floats(lane_lse + j * 32, lse[0], lse[1]);
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
