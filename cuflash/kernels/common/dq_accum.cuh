// How a backward kernel's warps share a matmul, and the layout of dQ's float sums in global memory:
// sm80/backward.cu and sm90/backward.cu add to the sums, finish/dq.cu reads them.
#pragma once
#include "common/constants.cuh"
#include "common/fragments.cuh"

constexpr int THREADS = NUM_WARPS * 32;

// A grid of warps over a ROWS x COLUMNS output, WARPS_DOWN of them along the rows. If it does not
// have all warps, the last ones have no part of the output.
template <int ROWS, int COLUMNS, int WARPS_DOWN, int WARPS_ACROSS_ = NUM_WARPS / WARPS_DOWN>
struct WarpGrid {
    static constexpr int WARPS_ACROSS = WARPS_ACROSS_;
    static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
    static_assert(NUM_WARPS % WARPS_DOWN == 0, "the warps form a rectangle");
    static_assert(ROWS % (WARPS_DOWN * 16) == 0, "a warp's rows are 16-row tiles");
    static_assert(COLUMNS % (WARPS_ACROSS * 8) == 0, "a warp's columns are 8-column tiles");
    using Fragments = float[M_TILES][N_TILES][4];
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
    }
};

using QueryGrid = WarpGrid<BLOCK_Q, HEAD_DIM, SCORE_WARPS_Q>;           // dQ

// A tile's sums lie in the order in which threads hold them, the four floats of a C fragment side
// by side, so a warp adds 512 contiguous bytes. A thread's first fragment is at dq_sum_first(), its
// fragment (m, n) dq_sum_step(m, n) floats further on.
__device__ __forceinline__ int dq_sum_first(int thread) {
    return (thread / 32 * (QueryGrid::M_TILES * QueryGrid::N_TILES) * 32 + thread % 32) * 4;
}
constexpr int dq_sum_step(int m, int n) { return (m * QueryGrid::N_TILES + n) * 32 * 4; }

// The same layout by element: the offset of (row, column) in its tile's sums.
__device__ __forceinline__ int dq_sum_offset(int row, int column) {
    const int warp = row / QueryGrid::WARP_ROWS + column / QueryGrid::WARP_COLUMNS * SCORE_WARPS_Q;
    const int m = row % QueryGrid::WARP_ROWS / 16, n = column % QueryGrid::WARP_COLUMNS / 8;
    const int lane = row % 8 * 4 + column % 8 / 2;
    return warp * (QueryGrid::M_TILES * QueryGrid::N_TILES * 128) + dq_sum_step(m, n)
         + lane * 4 + row % 16 / 8 * 2 + column % 2;
}

// The start of a tile's sums. Tiles of one (batch, head) are contiguous, then come the next head's.
__device__ __forceinline__ float* dq_sum_tile(void* dq_sum, i64 index) {
    return static_cast<float*>(dq_sum) + index * (BLOCK_Q * HEAD_DIM);
}
