// sm80/jvp.cu's matmuls in C fragments.
#pragma once
#include "sm80/forward_softmax.cuh"
#include "sm80/gemm_pair.cuh"
#include "score/tangents.cuh"

// S = Q K^T, or its negative if scale < 0, and X = Q' K^T + Q K'^T. By rows of the tiles q and
// q_dot, and k and k_dot, in shared memory.
__device__ __forceinline__ void score_gemms(
    Scores& s, Scores& x, u32 q, u32 q_dot, u32 k, u32 k_dot) {
    using Queries = OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES>;
    using Keys = OperandB<BLOCK_K, Stored::TRANSPOSED, S_TILES / 2>;
    const int first_row = threadIdx.x / 32 * WARP_ROWS;
    set_zero(s);
    set_zero(x);
    gemm_pair<Element, HEAD_DIM / 16, Q_DOT, K_DOT>(
        s, x, Queries(q, first_row), Queries(q_dot, first_row), Keys(k, 0), Keys(k_dot, 0));
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
            multiply_block<Element>(acc, n, a, b);
            if constexpr (SCORES_MOVE) multiply_block<Element>(acc_dot, n, a_dot, b);
            if constexpr (V_DOT) {
                load(b, values_dot, k, n);
                multiply_block<Element>(acc_dot, n, a, b);
            }
        }
    }
}
