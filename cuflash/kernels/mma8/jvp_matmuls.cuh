// S and W of mma8/jvp.cu: loads and MMAs overlap.
#pragma once
#include "mma8/mma8.cuh"

// d = A B^T and e = A' B^T + A B'^T, as gemm_abt_dot() of tangent_matmuls.cuh has them, of all rows
// of B. Each operand is loaded for the next step of the sum right after the last MMA that takes it,
// into the same registers: its load may take as long as the MMAs between.
template <bool A_DOT, bool B_DOT, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt_dot_ahead(
    Element (&d)[M][N][4], Element (&e)[M][N][4], const SmemTile<A_ROWS, COLUMNS>& a,
    const SmemTile<A_ROWS, COLUMNS>& a_dot, int first_row, const SmemTile<B_ROWS, COLUMNS>& b,
    const SmemTile<B_ROWS, COLUMNS>& b_dot) {
    static_assert(B_ROWS == N * 8, "all rows of B");
    set_zero<M, N>(d);
    set_zero<M, N>(e);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int PITCH = COLUMNS + ROWS_PAD;
    const Element* rows = &a.at[first_row + g][t];
    const Element* rows_dot = &a_dot.at[first_row + g][t];
    const Element* others = &b.at[g][t];
    const Element* others_dot = &b_dot.at[g][t];
    Operand x[M][4], x_dot[M][4], y[N][2], y_dot[N][2];
    const auto load_a = [&](Operand (&to)[M][4], const Element* from, int k) {
        #pragma unroll
        for (int m = 0; m < M; ++m) load_rows(to[m], from + m * 16 * PITCH + k, PITCH, 4);
    };
    const auto load_b = [&](Operand (&to)[2], const Element* from, int n, int k) {
        to[0] = operand(from[n * 8 * PITCH + k]);
        to[1] = operand(from[n * 8 * PITCH + k + 4]);
    };
    const auto multiply_rows = [](Element (&to)[M][N][4], const Operand (&u)[M][4], int n,
                                 const Operand (&v)[2]) {
        #pragma unroll
        for (int m = 0; m < M; ++m) multiply(to[m][n], u[m], v[0], v[1]);
    };
    load_a(x, rows, 0);
    if constexpr (A_DOT) load_a(x_dot, rows_dot, 0);
    #pragma unroll
    for (int n = 0; n < N; ++n) {
        load_b(y[n], others, n, 0);
        if constexpr (B_DOT) load_b(y_dot[n], others_dot, n, 0);
    }
    #pragma unroll 1
    for (int k = 8; k <= COLUMNS; k += 8) {
        const int next = k < COLUMNS ? k : 0;               // the last step's loads are not used
        if constexpr (A_DOT) {
            #pragma unroll
            for (int n = 0; n < N; ++n) multiply_rows(e, x_dot, n, y[n]);
            load_a(x_dot, rows_dot, next);
        }
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            multiply_rows(d, x, n, y[n]);
            load_b(y[n], others, n, next);
        }
        if constexpr (B_DOT) {
            #pragma unroll
            for (int n = 0; n < N; ++n) {
                multiply_rows(e, x, n, y_dot[n]);
                load_b(y_dot[n], others_dot, n, next);
            }
        }
        load_a(x, rows, next);
    }
}
