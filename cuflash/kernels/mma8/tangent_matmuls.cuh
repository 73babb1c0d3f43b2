// Matmuls of tiles and of their tangents at once, for mma8/jvp.cu and mma8/double_backward*.cu.
#pragma once
#include "mma8/mma8.cuh"

// d = A B^T and e = A' B^T + A B'^T, of the rows of gemm_abt(). A and B are read, and split into
// parts, once for all three matmuls. d adds in the order of gemm_abt(): the same scores to the last
// bit. A_DOT, B_DOT: whether A and B have tangents; without, the tile is not read. UNROLL: steps of
// the sum of which one's loads may overlap the other's MMAs.
template <bool A_DOT, bool B_DOT, int UNROLL = 1, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt_dot(
    Element (&d)[M][N][4], Element (&e)[M][N][4], const SmemTile<A_ROWS, COLUMNS>& a,
    const SmemTile<A_ROWS, COLUMNS>& a_dot, int first_row, const SmemTile<B_ROWS, COLUMNS>& b,
    const SmemTile<B_ROWS, COLUMNS>& b_dot, int first_column) {
    set_zero<M, N>(d);
    set_zero<M, N>(e);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int PITCH = COLUMNS + ROWS_PAD;
    #pragma unroll UNROLL
    for (int k = 0; k < COLUMNS; k += 8) {
        Operand x[M][4], x_dot[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            const int row = first_row + m * 16 + g;
            load_rows(x[m], &a.at[row][k + t], PITCH, 4);
            if constexpr (A_DOT) load_rows(x_dot[m], &a_dot.at[row][k + t], PITCH, 4);
        }
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            const Element* y = &b.at[first_column + n * 8 + g][k + t];
            const Operand first = operand(y[0]), second = operand(y[4]);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply(d[m][n], x[m], first, second);
                if constexpr (A_DOT) multiply(e[m][n], x_dot[m], first, second);
            }
            if constexpr (B_DOT) {
                const Element* y_dot = &b_dot.at[first_column + n * 8 + g][k + t];
                const Operand third = operand(y_dot[0]), fourth = operand(y_dot[4]);
                #pragma unroll
                for (int m = 0; m < M; ++m) multiply(e[m][n], x[m], third, fourth);
            }
        }
    }
}
