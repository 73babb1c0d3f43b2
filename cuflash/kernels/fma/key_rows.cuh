// A block's keys in backward passes (fma/backward.cu, fma/double_backward.cu): BLOCK_K of one key
// head. dK and dV stay in registers; parts of dQ are added to dQ in global memory, one query tile
// after another.
#pragma once
#include "fma/fma.cuh"
#include "common/dq_semaphore.cuh"
#include "score/query_order.cuh"
#include "common/scheduler.cuh"
#include "score/score_tile.cuh"

// A grid of warps over a ROWS x COLUMNS output, WARPS_DOWN of them along the rows.
template <int ROWS, int COLUMNS, int WARPS_DOWN> struct WarpGrid {
    static constexpr int WARPS_ACROSS = NUM_WARPS / WARPS_DOWN;
    static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static_assert(ROWS % (WARPS_DOWN * LANE_ROWS) == 0, "every lane has as many rows");
    static_assert(COLUMNS % (WARPS_ACROSS * LANE_COLUMNS) == 0, "every lane has as many columns");
    using Sums = float[WARP_ROWS / LANE_ROWS][WARP_COLUMNS / LANE_COLUMNS];
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
    }
};

using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q>;            // S, dP
using QueryGrid = WarpGrid<BLOCK_Q, HEAD_DIM, SCORE_WARPS_Q>;           // dQ
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV
using Scores = ScoreGrid::Sums;

static_assert(QueryGrid::WARP_COLUMNS % 32 == 0, "a warp's columns of dQ are chunks of all lanes");
static_assert(KeyGrid::WARP_COLUMNS % 32 == 0, "a warp's columns of dK are chunks of all lanes");
static_assert(ValueGrid::WARP_COLUMNS % 32 == 0, "a warp's columns of dV are chunks of all lanes");
static_assert(KeyGrid::WARP_ROWS % 16 == 0, "a warp's keys are chunks of all lanes");

// Adds the lane's sums to the rows of dQ from q_start on.
__device__ __forceinline__ void add_to_dq(
    const BackwardArguments& arrays, int batch, int head, int q_start,
    const QueryGrid::Sums& sums) {
    const Shape& shape = arrays.shape;
    const Strides stride = arrays.dq_stride;
    const bool aligned = rows_aligned(arrays.dq, stride);
    float* dq = static_cast<float*>(arrays.dq) + batch * stride.batch + head * stride.head;
    if (aligned && shape.head_dim == HEAD_DIM && q_start + BLOCK_Q <= shape.seqlen_q) {
        dq += (q_start + QueryGrid::first_row() + lane_row()) * stride.token
            + (QueryGrid::first_column() + lane_column() * CHUNK);
        #pragma unroll
        for (int i = 0; i < QueryGrid::WARP_ROWS / LANE_ROWS; ++i) {
            #pragma unroll
            for (int n = 0; n < QueryGrid::WARP_COLUMNS / LANE_COLUMNS; n += CHUNK)
                reduce_add_4(dq + n * 8,
                             {sums[i][n], sums[i][n + 1], sums[i][n + 2], sums[i][n + 3]});
            dq += LANE_ROWS * stride.token;
        }
        return;
    }
    #pragma unroll
    for (int i = 0; i < QueryGrid::WARP_ROWS / LANE_ROWS; ++i) {
        const int query = q_start + QueryGrid::first_row() + lane_row() + i * LANE_ROWS;
        if (query >= shape.seqlen_q) continue;
        float* row = dq + query * stride.token;
        #pragma unroll
        for (int n = 0; n < QueryGrid::WARP_COLUMNS / LANE_COLUMNS; n += CHUNK) {
            const int column = QueryGrid::first_column() + lane_column() * CHUNK + n * 8;
            const float four[CHUNK] = {sums[i][n], sums[i][n + 1], sums[i][n + 2], sums[i][n + 3]};
            if (aligned && column + CHUNK <= shape.head_dim) {
                reduce_add_4(row + column, four);
                continue;
            }
            #pragma unroll
            for (int c = 0; c < CHUNK; ++c)
                if (column + c < shape.head_dim) atomicAdd(row + column + c, four[c]);
        }
    }
}

// Stores the lane's chunks of dK or dV.
template <class Grid>
__device__ __forceinline__ void store_gradient(
    const typename Grid::Sums& sums, void* target, const Strides& stride, TileCoord coord,
    int seqlen, int num_columns) {
    const bool aligned = rows_aligned(target, stride);
    float* rows = static_cast<float*>(target) + coord.batch * stride.batch
                + coord.head * stride.head;
    #pragma unroll
    for (int i = 0; i < Grid::WARP_ROWS / LANE_ROWS; ++i) {
        const int key = coord.tile * BLOCK_K + Grid::first_row() + lane_row() * CHUNK
                      + i / CHUNK * (LANE_ROWS * CHUNK) + i % CHUNK;
        if (key >= seqlen) continue;
        #pragma unroll
        for (int n = 0; n < Grid::WARP_COLUMNS / LANE_COLUMNS; n += CHUNK) {
            const float four[CHUNK] = {sums[i][n], sums[i][n + 1], sums[i][n + 2], sums[i][n + 3]};
            store_chunk(rows + key * stride.token,
                        Grid::first_column() + lane_column() * CHUNK + n * 8, num_columns, aligned,
                        four);
        }
    }
}

// For dV and dK: whether query `row` sees the lane's i-th key. Keys come in chunks.
struct KeyVisibility {
    const ScoreTile& score_tile;
    int first_key;
    __device__ __forceinline__ bool operator()(int i, int row) const {
        return score_tile.visible(row, first_key + lane_row() * CHUNK
                                       + i / CHUNK * (LANE_ROWS * CHUNK) + i % CHUNK);
    }
};
