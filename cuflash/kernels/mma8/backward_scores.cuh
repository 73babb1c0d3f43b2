// mma8/backward.cu's tile of scores: P and dS of BLOCK_Q queries and BLOCK_K keys, and the matmuls
// that take them from shared memory.
#pragma once
#include "mma8/mma8.cuh"
#include "score/score_tile.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    SmemTile<BLOCK_Q, BLOCK_K> weights;                     // P, then dS
    Element lse[BLOCK_Q], delta[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// A grid of warps over a ROWS x COLUMNS output, WARPS_DOWN of them along the rows.
template <int ROWS, int COLUMNS, int WARPS_DOWN> struct WarpGrid {
    static constexpr int WARPS_ACROSS = NUM_WARPS / WARPS_DOWN;
    static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
    static_assert(ROWS % (WARPS_DOWN * 16) == 0, "a warp's rows are 16-row tiles");
    static_assert(COLUMNS % (WARPS_ACROSS * 8) == 0, "a warp's columns are 8-column tiles");
    using Sums = Fragments<M_TILES, N_TILES>;
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
    }
    // Where chunk c, 0 or 1, of the CHUNK tiles from n on begins (mma8.cuh).
    static __device__ __forceinline__ int column(int n, int c) {
        return first_column() + n * 8 + CHUNK * (threadIdx.x % 4 * 2 + c);
    }
};

using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q>;            // S, dP
using QueryGrid = WarpGrid<BLOCK_Q, HEAD_DIM, SCORE_WARPS_Q>;           // dQ
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV
using Scores = ScoreGrid::Sums;

// The lane's row i, 0 or 1, of a 16-row tile: of S, dP and dQ; and of dK and dV, where a lane has
// neighbouring rows.
__device__ __forceinline__ int query_row(int i) { return threadIdx.x % 32 / 4 + i * 8; }
__device__ __forceinline__ int key_row(int i) { return threadIdx.x % 32 / 4 * 2 + i; }

// P = exp(scale S - lse) and dS = scale P (dP - delta) replace S and dP; both are 0 for masked
// pairs. With dropout P Z, and dS = scale P (Z dP - delta). lse = -inf means that all scores of the
// query are -inf: P is 0.
template <bool MASKED>
__device__ __forceinline__ void compute_p_and_ds(
    Scores& s, Scores& dp, const SharedPlan& shared, const ScoreTile& score_tile,
    Element scale) {
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + m * 16 + query_row(half);
            const Element lse = effective_lse(shared.lse[row]);
            const Element delta = shared.delta[row];
            const int query = score_tile.q_start + row;
            u32 kept = 0;
            if constexpr (DROPOUT)
                kept = score_tile.dropout.kept_bits<ScoreGrid::N_TILES>(
                    query, score_tile.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2);
            #pragma unroll
            for (int n = 0; n < ScoreGrid::N_TILES; ++n)
                #pragma unroll
                for (int x = half * 2; x < half * 2 + 2; ++x) {
                    const int key =
                        ScoreGrid::first_column() + n * 8 + threadIdx.x % 4 * 2 + x % 2;
                    const bool visible = !MASKED || score_tile.visible(row, key);
                    Element &p = s[m][n][x], &ds = dp[m][n][x], derivative = 1;
                    if constexpr (LINEAR)
                        p = rounded(p, scale);
                    else
                        p = score_tile.score_mod.score(
                            p, score_tile.distance(row, key),
                            score_tile.score_mod.bias_of(query, score_tile.k_start + key),
                            derivative);
                    p = exponential(p - lse);
                    Element z = 1;
                    if constexpr (DROPOUT)
                        z = (kept >> (n * 2 + x % 2)) & 1 ? score_tile.dropout.factor : Element(0);
                    const Element dx = p * ((DROPOUT ? z * ds : ds) - delta);
                    if constexpr (DBIAS)
                        if (visible) score_tile.dbias.add(query, score_tile.k_start + key, dx);
                    ds = visible ? (SOFTCAP ? dx * derivative : dx) * scale : 0;
                    if (!visible) p = 0;
                    if constexpr (DROPOUT) p *= z;
                }
        }
}

// P or dS, to shared memory.
__device__ __forceinline__ void write_weights(SharedPlan& shared, const Scores& x) {
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
