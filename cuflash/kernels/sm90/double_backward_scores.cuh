// What a tile of pairs contributes to sm90/double_backward.cu's sums, from the accumulators of
// S^T, W^T, dP^T and U^T. A thread's fragment is that of backward_scores.cuh.
#pragma once
#include "sm90/backward_scores.cuh"
#include "sm90/second_rows.cuh"

// Calls f(i, x) for each element i, with x of its query: a row statistic from rows on, in shared
// memory. first_column: the lane's first query.
template <class F>
__device__ __forceinline__ void with_statistic(const float* rows, int first_column, F f) {
    const u32 of_lane = shared_address(rows) + first_column * 4;
    #pragma unroll
    for (int j = 0; j < S_REGS / 4; ++j) {
        float x[2];
        load_shared_floats(of_lane + j * 32, x[0], x[1]);
        #pragma unroll
        for (int i = 0; i < 4; ++i) f(j * 4 + i, x[i % 2]);
    }
}

// W / scale, as issue_scores().
__device__ __forceinline__ void issue_tangents(
    float (&w)[S_REGS], u64 k, u64 k_dot, u64 q, u64 q_dot) {
    warpgroup_fence_operand(w);
    wgmma_fence();
    if constexpr (Q_DOT) gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM>(w, k, q_dot);
    if constexpr (K_DOT) gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM>(w, k_dot, q, Q_DOT);
    wgmma_commit();
}

// W - b, from W / scale.
__device__ __forceinline__ void relative_tangents(
    float (&w)[S_REGS], const SecondRows& rows, int first_column) {
    const float scale = rows.scale;
    with_statistic(rows.b, first_column, [&](int i, float b) { w[i] = fmaf(w[i], scale, -b); });
}

// P (W - b), rounded.
__device__ __forceinline__ void round_product(
    u32 (&rounded)[S_REGS / 2], const float (&p)[S_REGS], const float (&w)[S_REGS]) {
    #pragma unroll
    for (int i = 0; i < S_REGS / 2; ++i)
        rounded[i] = pack<Element>(p[2 * i] * w[2 * i], p[2 * i + 1] * w[2 * i + 1]);
}

// dS = P (dP - D), from dP.
__device__ __forceinline__ void score_gradients(
    float (&dp)[S_REGS], const float (&p)[S_REGS], const SecondRows& rows, int first_column) {
    with_statistic(
        rows.delta, first_column, [&](int i, float delta) { dp[i] = p[i] * (dp[i] - delta); });
}

// T = dS (W - b) + P (U - F), from U.
__device__ __forceinline__ void second_score_gradients(
    float (&u)[S_REGS], const float (&p)[S_REGS], const float (&w)[S_REGS],
    const float (&ds)[S_REGS], const SecondRows& rows, int first_column) {
    with_statistic(rows.product, first_column, [&](int i, float product) {
        u[i] = fmaf(ds[i], w[i], p[i] * (u[i] - product));
    });
}
