// sm80/jvp.cu's matmuls in C fragments.
#pragma once
#include "sm80/gemm_pair.cuh"
#include "sm80/score_parts.cuh"
#include "score/directions.cuh"
#include "score/tangents.cuh"

static_assert(!READS_OUT, "every block computes O");

// W, then P * W, and O' in each of the block's directions.
using ScoreTangents = Scores[DIRECTIONS];
using OutputTangents = Output[DIRECTIONS];

// S = Q K^T, or its negative if scale < 0, and X = Q' K^T + Q K'^T. By rows of the tiles q and
// q_dot, and k and k_dot, in shared memory; tiles of directions are Q_BYTES and K_BYTES apart. Or
// the warp's part of these sums (score_parts.cuh).
template <int Q_BYTES, int K_BYTES>
__device__ __forceinline__ void score_gemms(
    Scores& s, ScoreTangents& x, u32 q, u32 q_dot, u32 k, u32 k_dot) {
    using Queries = OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES>;
    using Keys = OperandB<BLOCK_K, Stored::TRANSPOSED, S_TILES / 2>;
    const auto queries = [](u32 tile) { return part_of_a(Queries(tile, warp_row())); };
    const auto keys = [](u32 tile) { return part_of_b(Keys(tile, 0)); };
    set_zero(s);
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v) set_zero(x[v]);
    if constexpr (DIRECTIONS == 1)
        gemm_pair<Element, PART_BLOCKS, Q_DOT, K_DOT>(
            s, x[0], queries(q), queries(q_dot), keys(k), keys(k_dot));
    else
        gemm_tangents<Element, PART_BLOCKS, Q_DOT, K_DOT>(
            s, x, queries(q), [&](int v) { return queries(q_dot + v * Q_BYTES); }, keys(k),
            [&](int v) { return keys(k_dot + v * K_BYTES); });
    if (NEGATE_SCORES)
        for (auto& tile : s)
            for (auto& fragment : tile)
                for (float& score : fragment) score = -score;
}

// acc += P V,  acc_dot += (P * W) V + P V',  P and P * W rounded to Element. SANITIZED: with zeros
// for the NaNs and infinities of V and V'. The tiles v_dot are V_BYTES apart.
template <bool SANITIZED, int V_BYTES>
__device__ __forceinline__ void value_gemms(
    Output& acc, OutputTangents& acc_dot, const Scores& p, const ScoreTangents& pw, u32 v_tile,
    u32 v_dot_tile) {
    using Tile = OperandB<BLOCK_K, Stored::AS_NAMED, O_TILES / 2>;
    const auto load = [](u32 (&b)[4], const Tile& tile, int k, int n) {
        if constexpr (SANITIZED) Sanitized<Element, Tile>{tile}.load(b, k, n);
        else tile.load(b, k, n);
    };
    using Weights = RegisterA<Element, M_TILES, S_TILES>;
    const Weights weights(p), first(pw[0]), last(pw[DIRECTIONS - 1]);
    const Tile values(v_tile, warp_column());
    #pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
        u32 a[M_TILES][4], a_dot[DIRECTIONS][M_TILES][4];
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            weights.load(a[m], m, k);
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) (v == 0 ? first : last).load(a_dot[v][m], m, k);
        }
        #pragma unroll
        for (int n = 0; n < O_TILES / 2; ++n) {
            u32 b[4];
            load(b, values, k, n);
            multiply_block<Element>(acc, n, a, b);
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                if constexpr (SCORES_MOVE) multiply_block<Element>(acc_dot[v], n, a_dot[v], b);
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                if constexpr (V_DOT) {
                    load(b, Tile(v_dot_tile + v * V_BYTES, warp_column()), k, n);
                    multiply_block<Element>(acc_dot[v], n, a, b);
                }
        }
    }
}
