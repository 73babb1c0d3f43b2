// sm80/jvp.cu's matmuls in C fragments: operands that two products share are loaded once.
#pragma once
#include "sm80/forward_softmax.cuh"
#include "score/tangents.cuh"

// Columns 16 n .. of D += A B, B being one block's fragment.
template <int N_TILES>
__device__ __forceinline__ void multiply_block(
    float (&d)[M_TILES][N_TILES][4], int n, const u32 (&a)[M_TILES][4], const u32 (&b)[4]) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        mma_16x8x16(d[m][2 * n], a[m], b[0], b[1], Element{});
        mma_16x8x16(d[m][2 * n + 1], a[m], b[2], b[3], Element{});
    }
}

// S = Q K^T, or its negative if scale < 0, and X = Q' K^T + Q K'^T. By rows of the tiles q and
// q_dot, and k and k_dot, in shared memory.
__device__ __forceinline__ void score_gemms(
    Scores& s, Scores& x, u32 q, u32 q_dot, u32 k, u32 k_dot) {
    using Queries = OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES>;
    using Keys = OperandB<BLOCK_K, Stored::TRANSPOSED, S_TILES / 2>;
    const int first_row = threadIdx.x / 32 * WARP_ROWS;
    const Queries queries(q, first_row), queries_dot(q_dot, first_row);
    const Keys keys(k, 0), keys_dot(k_dot, 0);
    set_zero(s);
    set_zero(x);
    #pragma unroll 4
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        u32 a[M_TILES][4], a_dot[M_TILES][4];
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            queries.load(a[m], m, i);
            if constexpr (Q_DOT) queries_dot.load(a_dot[m], m, i);
        }
        #pragma unroll
        for (int n = 0; n < S_TILES / 2; ++n) {
            u32 b[4], b_dot[4];
            keys.load(b, i, n);
            multiply_block(s, n, a, b);
            if constexpr (Q_DOT) multiply_block(x, n, a_dot, b);
            if constexpr (K_DOT) {
                keys_dot.load(b_dot, i, n);
                multiply_block(x, n, a, b_dot);
            }
        }
    }
    if (NEGATE_SCORES)
        for (auto& tile : s)
            for (auto& fragment : tile)
                for (float& score : fragment) score = -score;
}

// acc += P V,  acc_dot += (P * W) V + P V',  P and P * W rounded to Element. SANITIZED: with zeros
// for the NaNs and infinities of V and V'.
template <bool SANITIZED>
__device__ __forceinline__ void value_gemms(
    Output& acc, Output& acc_dot, const Scores& p, const Scores& pw, u32 v, u32 v_dot) {
    using Tile = OperandB<BLOCK_K, Stored::AS_NAMED, O_TILES / 2>;
    const auto load = [](u32 (&b)[4], const Tile& tile, int k, int n) {
        if constexpr (SANITIZED) Sanitized<Element, Tile>{tile}.load(b, k, n);
        else tile.load(b, k, n);
    };
    const RegisterA<Element, M_TILES, S_TILES> weights(p), tangents(pw);
    const Tile values(v, 0), values_dot(v_dot, 0);
    #pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
        u32 a[M_TILES][4], a_dot[M_TILES][4];
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            weights.load(a[m], m, k);
            tangents.load(a_dot[m], m, k);
        }
        #pragma unroll
        for (int n = 0; n < O_TILES / 2; ++n) {
            u32 b[4];
            load(b, values, k, n);
            multiply_block(acc, n, a, b);
            if constexpr (SCORES_MOVE) multiply_block(acc_dot, n, a_dot, b);
            if constexpr (V_DOT) {
                load(b, values_dot, k, n);
                multiply_block(acc_dot, n, a, b);
            }
        }
    }
}
