// Matmuls of float tiles and of their tangents together, from one load of each number, for
// fma/jvp.cu and fma/double_backward.cu. Lanes hold what they hold in fma.cuh.
#pragma once
#include "fma/fma.cuh"

// s = a b^T and w = a' b^T + a b'^T, rows from first_row and columns from first_column on. A_MOVES,
// B_MOVES: whether there are an a' and a b'. Products are added in the order of d, s as gemm_abt()
// has it, to the last bit.
template <bool A_MOVES, bool B_MOVES, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt_pair(
    float (&s)[M][N], float (&w)[M][N], const SmemTile<A_ROWS, COLUMNS>& a,
    const SmemTile<A_ROWS, COLUMNS>& a_dot, int first_row, const SmemTile<B_ROWS, COLUMNS>& b,
    const SmemTile<B_ROWS, COLUMNS>& b_dot, int first_column) {
    set_zero(s);
    set_zero(w);
    constexpr int PITCH = COLUMNS + ROWS_PAD, A_STEP = LANE_ROWS * PITCH;
    constexpr int B_STEP = LANE_COLUMNS * PITCH;
    const float *rows = a.at[first_row + lane_row()], *others = b.at[first_column + lane_column()];
    const float* rows_dot = a_dot.at[first_row + lane_row()];
    const float* others_dot = b_dot.at[first_column + lane_column()];
    #pragma unroll 1
    for (int d = 0; d < COLUMNS; d += CHUNK) {
        float4 x[M], x_dot[M];
        #pragma unroll
        for (int i = 0; i < M; ++i) {
            x[i] = chunk_at(rows + i * A_STEP + d);
            if (A_MOVES) x_dot[i] = chunk_at(rows_dot + i * A_STEP + d);
        }
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const float4 y = chunk_at(others + j * B_STEP + d);
            float4 y_dot;
            if (B_MOVES) y_dot = chunk_at(others_dot + j * B_STEP + d);
            #pragma unroll
            for (int k = 0; k < CHUNK; ++k)
                #pragma unroll
                for (int i = 0; i < M; ++i) {
                    s[i][j] = fmaf(number(x[i], k), number(y, k), s[i][j]);
                    if (A_MOVES) w[i][j] = fmaf(number(x_dot[i], k), number(y, k), w[i][j]);
                    if (B_MOVES) w[i][j] = fmaf(number(x[i], k), number(y_dot, k), w[i][j]);
                }
        }
    }
}

// sum += p b and sum_dot += p' b + p b' over K steps from first_k on; p has rows from first_row on.
// P_MOVES, B_MOVES: whether there are a p' and a b'. visible(i, k) and `nonfinite`, of b and b': as
// in gemm_ab().
template <bool P_MOVES, bool B_MOVES, bool MASKED, int K, int M, int N, int P_ROWS, int B_ROWS,
          int COLUMNS, class F>
__device__ __forceinline__ void gemm_ab_pair(
    float (&sum)[M][N], float (&sum_dot)[M][N], const WeightTile<P_ROWS, K>& p,
    const WeightTile<P_ROWS, K>& p_dot, int first_row, const SmemTile<B_ROWS, COLUMNS>& b,
    const SmemTile<B_ROWS, COLUMNS>& b_dot, int first_k, F visible, bool nonfinite) {
    if (MASKED && PAIRWISE && !nonfinite)
        return gemm_ab_pair<P_MOVES, B_MOVES, false>(
            sum, sum_dot, p, p_dot, first_row, b, b_dot, first_k, visible, false);
    constexpr int PITCH = K + 8, B_PITCH = COLUMNS + ROWS_PAD;
    const float* rows = p.at[first_row + lane_row()];
    const float* rows_dot = p_dot.at[first_row + lane_row()];
    const float* others = &b.at[first_k][lane_column() * CHUNK];
    const float* others_dot = &b_dot.at[first_k][lane_column() * CHUNK];
    #pragma unroll 1
    for (int k = 0; k < K; k += CHUNK) {
        float4 x[M], x_dot[M];
        #pragma unroll
        for (int i = 0; i < M; ++i) {
            x[i] = chunk_at(rows + i * LANE_ROWS * PITCH + k);
            if (P_MOVES) x_dot[i] = chunk_at(rows_dot + i * LANE_ROWS * PITCH + k);
        }
        #pragma unroll
        for (int kk = 0; kk < CHUNK; ++kk) {
            #pragma unroll
            for (int n = 0; n < N; n += CHUNK) {
                const float4 y = chunk_at(others + (k + kk) * B_PITCH + n * 8);
                float4 y_dot;
                if (B_MOVES) y_dot = chunk_at(others_dot + (k + kk) * B_PITCH + n * 8);
                #pragma unroll
                for (int i = 0; i < M; ++i) {
                    if (MASKED && !visible(i, first_k + k + kk)) continue;
                    const float weight = number(x[i], kk);
                    #pragma unroll
                    for (int c = 0; c < CHUNK; ++c) {
                        float& moved = sum_dot[i][n + c];
                        sum[i][n + c] = fmaf(weight, number(y, c), sum[i][n + c]);
                        if (P_MOVES) moved = fmaf(number(x_dot[i], kk), number(y, c), moved);
                        if (B_MOVES) moved = fmaf(weight, number(y_dot, c), moved);
                    }
                }
            }
        }
    }
}

// A barrier. barrier_or_nonfinite() of a tile and, if it MOVES, its tangent.
template <bool MASKED, bool MOVES, int ROWS, int COLUMNS>
__device__ __forceinline__ bool barrier_or_nonfinite_pair(
    const SmemTile<ROWS, COLUMNS>& tile, const SmemTile<ROWS, COLUMNS>& tile_dot) {
    if constexpr (MASKED && PAIRWISE) {
        const bool found = loaded_nonfinite(tile) || (MOVES && loaded_nonfinite(tile_dot));
        return __syncthreads_or(found);
    } else {
        __syncthreads();
        return false;
    }
}
