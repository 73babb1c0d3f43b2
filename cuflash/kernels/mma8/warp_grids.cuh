// How the warps of mma8's backward kernels share a tile of pairs and the gradients, and the tile of
// weights, in shared memory, between them.
#pragma once
#include "mma8/mma8.cuh"

constexpr int ROLE_WARPS = NUM_WARPS / WARP_ROLES;

// A grid of a role's warps over a ROWS x COLUMNS output, WARPS_DOWN of them along the rows. PARTS
// warps have the same rows and columns, and a part each of their sums (score_parts.cuh).
template <int ROWS, int COLUMNS, int WARPS_DOWN, int PARTS = 1> struct WarpGrid {
    static constexpr int WARPS_ACROSS = ROLE_WARPS / WARPS_DOWN / PARTS;
    static constexpr int GROUPS = WARPS_DOWN * WARPS_ACROSS;
    static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
    static_assert(ROWS % (WARPS_DOWN * 16) == 0, "a warp's rows are 16-row tiles");
    static_assert(ROLE_WARPS % (WARPS_DOWN * PARTS) == 0, "a role's warps fill the grid");
    static_assert(COLUMNS % (WARPS_ACROSS * 8) == 0, "a warp's columns are 8-column tiles");
    using Sums = Fragments<M_TILES, N_TILES>;
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        if constexpr (PARTS > 1) return group() / WARPS_DOWN * WARP_COLUMNS;
        else if constexpr (WARP_ROLES == 1) return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
        else return threadIdx.x / 32 % ROLE_WARPS / WARPS_DOWN * WARP_COLUMNS;
    }
    static __device__ __forceinline__ int group() { return threadIdx.x / 32 % GROUPS; }
    static __device__ __forceinline__ int part() {
        return PARTS == 1 ? 0 : threadIdx.x / 32 / GROUPS;
    }
    // Where chunk c, 0 or 1, of the CHUNK tiles from n on begins (mma8.cuh).
    static __device__ __forceinline__ int column(int n, int c) {
        return first_column() + n * 8 + CHUNK * (threadIdx.x % 4 * 2 + c);
    }
};

using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q, SCORE_PARTS>;   // S, dP
using QueryGrid = WarpGrid<BLOCK_Q, HEAD_DIM, SCORE_WARPS_Q>;           // dQ
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV
using Scores = ScoreGrid::Sums;
using WeightTile = SmemTile<BLOCK_Q, BLOCK_K>;

// The lane's row i, 0 or 1, of a 16-row tile: of S, dP and dQ; and of dK and dV, where a lane has
// neighbouring rows.
__device__ __forceinline__ int query_row(int i) { return threadIdx.x % 32 / 4 + i * 8; }
__device__ __forceinline__ int key_row(int i) { return threadIdx.x % 32 / 4 * 2 + i; }

// P, dS or another weight of the pairs, to the WeightTile of `shared`.
template <class Shared>
__device__ __forceinline__ void write_weights(Shared& shared, const Scores& x) {
    if (ScoreGrid::part() != 0) return;
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < ScoreGrid::N_TILES; ++n)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<Pair*>(
                    &shared.weights.at[ScoreGrid::first_row() + m * 16 + query_row(half)]
                                      [ScoreGrid::first_column() + n * 8 + threadIdx.x % 4 * 2]) =
                    Pair{x[m][n][half * 2], x[m][n][half * 2 + 1]};
}
