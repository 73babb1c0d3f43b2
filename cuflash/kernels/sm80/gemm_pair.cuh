// A matmul and its tangent together, in C fragments: fragments that both need are loaded once.
#pragma once
#include "sm80/mma.cuh"

// Columns 16 n.. of D += A B, for the 16 indices of A's and B's fragments.
template <class Element, int M_TILES, int N_TILES>
__device__ __forceinline__ void multiply_block(
    float (&d)[M_TILES][N_TILES][4], int n, const u32 (&a)[M_TILES][4], const u32 (&b)[4]) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        mma_16x8x16(d[m][2 * n], a[m], b[0], b[1], Element{});
        mma_16x8x16(d[m][2 * n + 1], a[m], b[2], b[3], Element{});
    }
}

// D += A B and D' += A' B + A B' over K_BLOCKS * 16 indices. A_DOT, B_DOT: whether there are an A'
// and a B'. Operands and UNROLL as in gemm().
template <class Element, int K_BLOCKS, bool A_DOT, bool B_DOT, int UNROLL = 4, int M_TILES,
          int N_TILES, class A, class B>
__device__ __forceinline__ void gemm_pair(
    float (&d)[M_TILES][N_TILES][4], float (&d_dot)[M_TILES][N_TILES][4], const A& a,
    const A& a_dot, const B& b, const B& b_dot) {
    #pragma unroll UNROLL
    for (int k = 0; k < K_BLOCKS; ++k) {
        u32 a_fragment[M_TILES][4], a_dot_fragment[M_TILES][4];
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            a.load(a_fragment[m], m, k);
            if constexpr (A_DOT) a_dot.load(a_dot_fragment[m], m, k);
        }
        #pragma unroll
        for (int n = 0; n < N_TILES / 2; ++n) {
            u32 b_fragment[4];
            b.load(b_fragment, k, n);
            multiply_block<Element>(d, n, a_fragment, b_fragment);
            if constexpr (A_DOT) multiply_block<Element>(d_dot, n, a_dot_fragment, b_fragment);
            if constexpr (B_DOT) {
                b_dot.load(b_fragment, k, n);
                multiply_block<Element>(d_dot, n, a_fragment, b_fragment);
            }
        }
    }
}

// The same in each of COUNT directions v, with the operands a_dot(v) and b_dot(v).
template <class Element, int K_BLOCKS, bool A_DOT, bool B_DOT, int UNROLL = 4, int COUNT,
          int M_TILES, int N_TILES, class A, class ADot, class B, class BDot>
__device__ __forceinline__ void gemm_tangents(
    float (&d)[M_TILES][N_TILES][4], float (&d_dot)[COUNT][M_TILES][N_TILES][4], const A& a,
    const ADot& a_dot, const B& b, const BDot& b_dot) {
    #pragma unroll UNROLL
    for (int k = 0; k < K_BLOCKS; ++k) {
        u32 a_fragment[M_TILES][4], a_dot_fragment[COUNT][M_TILES][4];
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            a.load(a_fragment[m], m, k);
            #pragma unroll
            for (int v = 0; v < COUNT; ++v)
                if constexpr (A_DOT) a_dot(v).load(a_dot_fragment[v][m], m, k);
        }
        #pragma unroll
        for (int n = 0; n < N_TILES / 2; ++n) {
            u32 b_fragment[4];
            b.load(b_fragment, k, n);
            multiply_block<Element>(d, n, a_fragment, b_fragment);
            #pragma unroll
            for (int v = 0; v < COUNT; ++v)
                if constexpr (A_DOT)
                    multiply_block<Element>(d_dot[v], n, a_dot_fragment[v], b_fragment);
            #pragma unroll
            for (int v = 0; v < COUNT; ++v)
                if constexpr (B_DOT) {
                    b_dot(v).load(b_fragment, k, n);
                    multiply_block<Element>(d_dot[v], n, a_fragment, b_fragment);
                }
        }
    }
}

// gemm_pair() of 8 columns of B, stored TRANSPOSED.
template <class Element, int K_BLOCKS, bool A_DOT, bool B_DOT, int M_TILES, class A, int ROWS>
__device__ __forceinline__ void gemm_pair_narrow(
    float (&d)[M_TILES][1][4], float (&d_dot)[M_TILES][1][4], const A& a, const A& a_dot,
    const NarrowB<ROWS>& b, const NarrowB<ROWS>& b_dot) {
    static_assert(K_BLOCKS % 2 == 0, "NarrowB loads two blocks of rows");
    #pragma unroll 2
    for (int k = 0; k < K_BLOCKS; k += 2) {
        u32 columns[4], columns_dot[4];
        b.load(columns, k / 2);
        if constexpr (B_DOT) b_dot.load(columns_dot, k / 2);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto multiply = [&](float (&sum)[4], const u32 (&rows)[4], const u32 (&x)[4]) {
                mma_16x8x16(sum, rows, x[2 * half], x[2 * half + 1], Element{});
            };
            #pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                u32 rows[4];
                a.load(rows, m, k + half);
                multiply(d[m][0], rows, columns);
                if constexpr (B_DOT) multiply(d_dot[m][0], rows, columns_dot);
                if constexpr (A_DOT) {
                    a_dot.load(rows, m, k + half);
                    multiply(d_dot[m][0], rows, columns);
                }
            }
        }
    }
}
