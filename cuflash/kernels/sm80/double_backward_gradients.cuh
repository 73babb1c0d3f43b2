// sm80/double_backward.cu's sums: matmuls of weights and rows, both in shared memory, which keep
// NaN and infinity of masked pairs out.
#pragma once
#include "sm80/backward_gradients.cuh"
#include "sm80/double_backward_weights.cuh"

// D += A B as gradient_gemm(), of tiles as they stand in shared memory; then, if B has a NaN or an
// infinity, the terms that it left out, of visible pairs. nonfinite: the same in the whole block.
template <bool QUERY_ROWS, int B_ROWS, bool MASKED, class TileA, class TileB, int M, int N>
__device__ __forceinline__ void add_product(
    float (&d)[M][N][4], const TileA& weights, const TileB& rows, int first_row, int first_column,
    const ScoreTile& score_tile, bool nonfinite) {
    gradient_gemm<QUERY_ROWS, B_ROWS, MASKED>(
        d, shared_address(&weights), shared_address(&rows), first_row, first_column, nonfinite);
    if (!MASKED || !nonfinite) return;
    const int column = first_column + threadIdx.x % 4 * 2;
    #pragma unroll 1
    for (int l = 0; l < B_ROWS; ++l)
        #pragma unroll
        for (int m = 0; m < M; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + m * 16 + half * 8 + threadIdx.x % 32 / 4;
                const int i = QUERY_ROWS ? row : l, j = QUERY_ROWS ? l : row;
                if (!score_tile.visible(i, j)) continue;
                const float weight = to_float(*reinterpret_cast<const Element*>(
                    weights.bytes + tile_offset<BLOCK_Q>(i, j)));
                #pragma unroll
                for (int n = 0; n < N; ++n) {
                    const u32 pair = *reinterpret_cast<const u32*>(
                        rows.bytes + tile_offset<B_ROWS>(l, column + n * 8));
                    const float x[2] = {to_float(low_half<Element>(pair)),
                                        to_float(high_half<Element>(pair))};
                    for (int c = 0; c < 2; ++c)
                        if (is_nonfinite(x[c])) d[m][n][half * 2 + c] += weight * x[c];
                }
            }
}

// d2Q / scale = T_X K + (g dS) ddK of query tile q_tile, added to its float sums, DQ_SLICE tiles of
// columns at a time.
template <bool MASKED, class Shared>
__device__ __forceinline__ void add_d2q(
    DqSemaphore<>& dq_semaphore, const Shared& shared, const BackwardArguments& arrays,
    const ScoreTile& score_tile, TileCoord coord, int head, int q_tile, int num_q_tiles,
    bool nonfinite) {
    const i64 index = query_tile_index(arrays, coord.batch, head, num_q_tiles, q_tile);
    int* semaphore = arrays.dq_semaphores + index;
    float* sum = dq_sum_tile(arrays.dq_sum, index) + dq_sum_first(threadIdx.x);
    #pragma unroll
    for (int first = 0; first < QueryGrid::N_TILES; first += DQ_SLICE) {
        const int row = QueryGrid::first_row(), column = QueryGrid::first_column() + first * 8;
        float d2q[QueryGrid::M_TILES][DQ_SLICE][4];
        set_zero(d2q);
        add_product<true, BLOCK_K, MASKED>(
            d2q, shared.tx, shared.k, row, column, score_tile, nonfinite);
        if constexpr (K_DOT)
            add_product<true, BLOCK_K, MASKED>(
                d2q, shared.ds, shared.k_dot, row, column, score_tile, nonfinite);
        if (first == 0) dq_semaphore.wait(semaphore, score_tile.dq_rank(q_tile, coord.tile));
        #pragma unroll
        for (int m = 0; m < QueryGrid::M_TILES; ++m)
            #pragma unroll
            for (int n = 0; n < DQ_SLICE; ++n)
                reduce_add_4(sum + dq_sum_step(m, first + n), d2q[m][n]);
    }
}
