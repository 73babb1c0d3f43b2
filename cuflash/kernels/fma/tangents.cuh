// Matmuls of float tiles and of their tangents together, from one load of each number, for
// fma/jvp.cu and fma/double_backward.cu. Lanes hold what they hold in fma.cuh. D: directions, in
// each of which a tile has a tangent.
#pragma once
#include "fma/fma.cuh"

// s = a b^T and w = a' b^T + a b'^T in each direction, rows from first_row and columns from
// first_column on. A_MOVES, B_MOVES: whether there are an a' and a b'. Products are added in the
// order of d, s as gemm_abt() has it, to the last bit.
template <bool A_MOVES, bool B_MOVES, int D, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt_tangents(
    float (&s)[M][N], float (&w)[D][M][N], const SmemTile<A_ROWS, COLUMNS>& a,
    const SmemTile<A_ROWS, COLUMNS> (&a_dot)[D], int first_row, const SmemTile<B_ROWS, COLUMNS>& b,
    const SmemTile<B_ROWS, COLUMNS> (&b_dot)[D], int first_column) {
    set_zero(s);
    constexpr int PITCH = COLUMNS + ROWS_PAD, A_STEP = LANE_ROWS * PITCH;
    constexpr int B_STEP = LANE_COLUMNS * PITCH;
    const float *rows = a.at[first_row + lane_row()], *others = b.at[first_column + lane_column()];
    const float *rows_dot[D], *others_dot[D];
    #pragma unroll
    for (int v = 0; v < D; ++v) {
        set_zero(w[v]);
        rows_dot[v] = a_dot[v].at[first_row + lane_row()];
        others_dot[v] = b_dot[v].at[first_column + lane_column()];
    }
    #pragma unroll 1
    for (int d = 0; d < COLUMNS; d += CHUNK) {
        float4 x[M], x_dot[D][M];
        #pragma unroll
        for (int i = 0; i < M; ++i) {
            x[i] = chunk_at(rows + i * A_STEP + d);
            #pragma unroll
            for (int v = 0; v < D; ++v)
                if (A_MOVES) x_dot[v][i] = chunk_at(rows_dot[v] + i * A_STEP + d);
        }
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const float4 y = chunk_at(others + j * B_STEP + d);
            float4 y_dot[D];
            #pragma unroll
            for (int v = 0; v < D; ++v)
                if (B_MOVES) y_dot[v] = chunk_at(others_dot[v] + j * B_STEP + d);
            #pragma unroll
            for (int k = 0; k < CHUNK; ++k)
                #pragma unroll
                for (int i = 0; i < M; ++i) {
                    s[i][j] = fmaf(number(x[i], k), number(y, k), s[i][j]);
                    #pragma unroll
                    for (int v = 0; v < D; ++v) {
                        float& moved = w[v][i][j];
                        if (A_MOVES) moved = fmaf(number(x_dot[v][i], k), number(y, k), moved);
                        if (B_MOVES) moved = fmaf(number(x[i], k), number(y_dot[v], k), moved);
                    }
                }
        }
    }
}

// sum += p b and sum_dot += p' b + p b' in each direction, over K steps from first_k on; p has rows
// from first_row on. P_MOVES, B_MOVES: whether there are a p' and a b'. visible(i, k) and
// `nonfinite`, of b and b': as in gemm_ab().
template <bool P_MOVES, bool B_MOVES, bool MASKED, int D, int K, int M, int N, int P_ROWS,
          int B_ROWS, int COLUMNS, class F>
__device__ __forceinline__ void gemm_ab_tangents(
    float (&sum)[M][N], float (&sum_dot)[D][M][N], const WeightTile<P_ROWS, K>& p,
    const WeightTile<P_ROWS, K> (&p_dot)[D], int first_row, const SmemTile<B_ROWS, COLUMNS>& b,
    const SmemTile<B_ROWS, COLUMNS> (&b_dot)[D], int first_k, F visible, bool nonfinite) {
    if (MASKED && PAIRWISE && !nonfinite)
        return gemm_ab_tangents<P_MOVES, B_MOVES, false>(
            sum, sum_dot, p, p_dot, first_row, b, b_dot, first_k, visible, false);
    constexpr int PITCH = K + 8, B_PITCH = COLUMNS + ROWS_PAD;
    const float* rows = p.at[first_row + lane_row()];
    const float* others = &b.at[first_k][lane_column() * CHUNK];
    const float *rows_dot[D], *others_dot[D];
    #pragma unroll
    for (int v = 0; v < D; ++v) {
        rows_dot[v] = p_dot[v].at[first_row + lane_row()];
        others_dot[v] = &b_dot[v].at[first_k][lane_column() * CHUNK];
    }
    #pragma unroll 1
    for (int k = 0; k < K; k += CHUNK) {
        float4 x[M], x_dot[D][M];
        #pragma unroll
        for (int i = 0; i < M; ++i) {
            x[i] = chunk_at(rows + i * LANE_ROWS * PITCH + k);
            #pragma unroll
            for (int v = 0; v < D; ++v)
                if (P_MOVES) x_dot[v][i] = chunk_at(rows_dot[v] + i * LANE_ROWS * PITCH + k);
        }
        #pragma unroll
        for (int kk = 0; kk < CHUNK; ++kk) {
            #pragma unroll
            for (int n = 0; n < N; n += CHUNK) {
                const float4 y = chunk_at(others + (k + kk) * B_PITCH + n * 8);
                float4 y_dot[D];
                #pragma unroll
                for (int v = 0; v < D; ++v)
                    if (B_MOVES) y_dot[v] = chunk_at(others_dot[v] + (k + kk) * B_PITCH + n * 8);
                #pragma unroll
                for (int i = 0; i < M; ++i) {
                    if (MASKED && !visible(i, first_k + k + kk)) continue;
                    const float weight = number(x[i], kk);
                    #pragma unroll
                    for (int c = 0; c < CHUNK; ++c) {
                        sum[i][n + c] = fmaf(weight, number(y, c), sum[i][n + c]);
                        #pragma unroll
                        for (int v = 0; v < D; ++v) {
                            float& moved = sum_dot[v][i][n + c];
                            if (P_MOVES)
                                moved = fmaf(number(x_dot[v][i], kk), number(y, c), moved);
                            if (B_MOVES) moved = fmaf(weight, number(y_dot[v], c), moved);
                        }
                    }
                }
            }
        }
    }
}

// A barrier. barrier_or_nonfinite() of a tile and, if it MOVES, its tangents.
template <bool MASKED, bool MOVES, int D, int ROWS, int COLUMNS>
__device__ __forceinline__ bool barrier_or_nonfinite_all(
    const SmemTile<ROWS, COLUMNS>& tile, const SmemTile<ROWS, COLUMNS> (&tile_dot)[D]) {
    if constexpr (MASKED && PAIRWISE) {
        bool found = loaded_nonfinite(tile);
        #pragma unroll
        for (int v = 0; v < D; ++v) found = found || (MOVES && loaded_nonfinite(tile_dot[v]));
        return __syncthreads_or(found);
    } else {
        __syncthreads();
        return false;
    }
}
