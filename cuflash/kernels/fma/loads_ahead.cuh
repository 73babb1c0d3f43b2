// The products of fma.cuh for fma/forward.cu and fma/backward.cu, with loads one step ahead of the
// multiply-adds: a lane has two buffers of both factors. So multiply-adds seldom wait for shared
// memory, which the other warp of a scheduler hides in part only. This takes registers: where a
// lane has 8 rows in forward, it gains nothing, and double_backward.cu would spill
// (docs/lab/float_kernels.md).
//
// From one multiply-add to the next one factor stays the same, so that ptxas reads it from the
// operand cache (.reuse).
#pragma once
#include "fma/fma.cuh"

// Zeroes the rows' padding, which the last loads of gemm_abt_ahead() read and nothing uses: a test
// for the end in its loop would take issue slots. Whole block, before a barrier.
template <int... ROWS, int... COLUMNS>
__device__ __forceinline__ void clear_padding(SmemTile<ROWS, COLUMNS>&... tiles) {
    const auto clear = [](float* first, int rows, int pitch) {
        for (int row = threadIdx.x; row < rows; row += THREADS)
            *reinterpret_cast<Chunk*>(first + row * pitch) = Chunk{};
    };
    (clear(&tiles.at[0][COLUMNS], ROWS, COLUMNS + ROWS_PAD), ...);
}

// gemm_abt(), of tiles with a clear_padding(). SWAPPED: adds columns 1, 0, 3, 2 of each four, where
// forward does not compute the same sum: ptxas then assigns fewer registers to two products in a
// row (without loads ahead 217 instead of 254, at head_dim 64).
template <bool SWAPPED, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt_ahead(
    float (&s)[M][N], const SmemTile<A_ROWS, COLUMNS>& a, int first_row,
    const SmemTile<B_ROWS, COLUMNS>& b, int first_column) {
    static_assert(COLUMNS % (2 * CHUNK) == 0 && ROWS_PAD >= CHUNK, "two steps, a chunk of padding");
    if constexpr (M * N >= 64)                              // would spill
        return gemm_abt(s, a, first_row, b, first_column);
    set_zero(s);
    const float* rows = a.at[first_row + lane_row()];
    const float* others = b.at[first_column + lane_column()];
    constexpr int PITCH = COLUMNS + ROWS_PAD, A_STEP = LANE_ROWS * PITCH;
    constexpr int B_STEP = LANE_COLUMNS * PITCH;
    float4 x[2][M], y[2][N];
    const auto load = [&](int buffer, int d) {
        #pragma unroll
        for (int i = 0; i < M; ++i) x[buffer][i] = chunk_at(rows + i * A_STEP + d);
        #pragma unroll
        for (int j = 0; j < N; ++j) y[buffer][j] = chunk_at(others + j * B_STEP + d);
    };
    const auto compute = [&](int buffer) {
        #pragma unroll
        for (int j = 0; j < N; ++j)
            #pragma unroll
            for (int column = 0; column < CHUNK; ++column)
                #pragma unroll
                for (int row = 0; row < M; ++row) {
                    const int k = SWAPPED ? column ^ 1 : column, i = k % 2 ? M - 1 - row : row;
                    s[i][j] = fmaf(number(x[buffer][i], k), number(y[buffer][j], k), s[i][j]);
                }
    };
    load(0, 0);
    #pragma unroll 1
    for (int d = 0; d < COLUMNS; d += 2 * CHUNK) {
        load(1, d + CHUNK);
        compute(0);
        load(0, d + 2 * CHUNK);
        compute(1);
    }
}

// sum[i][n] += x(i) * y[n], for the lane's rows i that are visible(i).
template <int M, int N, class X, class F>
__device__ __forceinline__ void add_outer_product(
    float (&sum)[M][N], X x, const float4 (&y)[N / CHUNK], F visible) {
    #pragma unroll
    for (int n = 0; n < N / CHUNK; ++n)
        #pragma unroll
        for (int row = 0; row < M; ++row) {
            const int i = n % 2 ? M - 1 - row : row;
            if (!visible(i)) continue;
            #pragma unroll
            for (int column = 0; column < CHUNK; ++column) {
                const int c = (row + n * M) % 2 ? CHUNK - 1 - column : column;
                sum[i][n * CHUNK + c] = fmaf(x(i), number(y[n], c), sum[i][n * CHUNK + c]);
            }
        }
}

// gemm_ab(). In the last step, the loads are of the first once more, and not used.
template <bool MASKED, int K, int M, int N, int PITCH, int B_ROWS, int COLUMNS, class F>
__device__ __forceinline__ void gemm_ab_ahead(
    float (&sum)[M][N], const float (*weights)[PITCH], const SmemTile<B_ROWS, COLUMNS>& b,
    int first_k, int first_column, F visible, bool nonfinite) {
    if (MASKED && PAIRWISE && !nonfinite)
        return gemm_ab_ahead<false, K>(
            sum, weights, b, first_k, first_column, visible, false);
    constexpr int STEPS = 2 * CHUNK;
    static_assert(K % STEPS == 0, "whole iterations");
    const float* rows = weights[lane_row()];
    const float* others = &b.at[first_k][first_column + lane_column() * CHUNK];
    float4 x[2][M], y[2][N / CHUNK];
    const auto load_x = [&](int buffer, int k) {
        #pragma unroll
        for (int i = 0; i < M; ++i) x[buffer][i] = chunk_at(rows + i * LANE_ROWS * PITCH + k);
    };
    const auto load_y = [&](int buffer, int k) {
        #pragma unroll
        for (int n = 0; n < N / CHUNK; ++n)
            y[buffer][n] = chunk_at(others + k * (COLUMNS + ROWS_PAD) + n * 32);
    };
    load_x(0, 0);
    load_y(0, 0);
    #pragma unroll 1
    for (int first = 0; first < K; first += STEPS)
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int k = first + step, chunk = step / CHUNK;
            const auto later = [&](int steps) {
                return step + steps < STEPS || first + STEPS < K ? k + steps : 0;
            };
            if (step % CHUNK == 0) load_x(1 - chunk, later(CHUNK));
            load_y(1 - step % 2, later(1));
            add_outer_product(
                sum, [&](int i) { return number(x[chunk][i], step % CHUNK); }, y[step % 2],
                [&](int i) { return !MASKED || visible(i, first_k + k); });
        }
}

// gemm_atb(), and its last loads likewise.
template <bool MASKED, int K, int M, int N, int PITCH, int COLUMNS, class F>
__device__ __forceinline__ void gemm_atb_ahead(
    float (&sum)[M][N], const float (&weights)[K][PITCH], int first_row,
    const SmemTile<K, COLUMNS>& b, int first_column, F visible, bool nonfinite) {
    if (MASKED && PAIRWISE && !nonfinite)
        return gemm_atb_ahead<false>(
            sum, weights, first_row, b, first_column, visible, false);
    static_assert(M % CHUNK == 0 && N % CHUNK == 0, "rows and columns come in chunks");
    static_assert(K % 2 == 0, "two steps an iteration");
    const float* rows = &weights[0][first_row + lane_row() * CHUNK];
    const float* others = &b.at[0][first_column + lane_column() * CHUNK];
    float4 x[2][M / CHUNK], y[2][N / CHUNK];
    const auto load = [&](int buffer, int k) {
        #pragma unroll
        for (int i = 0; i < M / CHUNK; ++i) x[buffer][i] = chunk_at(rows + k * PITCH + i * 16);
        #pragma unroll
        for (int n = 0; n < N / CHUNK; ++n)
            y[buffer][n] = chunk_at(others + k * (COLUMNS + ROWS_PAD) + n * 32);
    };
    load(0, 0);
    #pragma unroll (M * N >= 64 ? 2 : 4)
    for (int first = 0; first < K; first += 2)
        #pragma unroll
        for (int buffer = 0; buffer < 2; ++buffer) {
            const int k = first + buffer, next = k + 1;
            load(1 - buffer, buffer == 0 || next < K ? next : 0);
            add_outer_product(
                sum, [&](int i) { return number(x[buffer][i / CHUNK], i % CHUNK); }, y[buffer],
                [&](int i) { return !MASKED || visible(i, k); });
        }
}
