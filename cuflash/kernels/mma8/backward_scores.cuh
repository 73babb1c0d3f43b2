// mma8/backward.cu's tile of scores: P and dS of BLOCK_Q queries and BLOCK_K keys.
#pragma once
#include "mma8/score_parts.cuh"
#include "mma8/warp_grids.cuh"
#include "score/score_tile.cuh"

template <bool IN_TURN> struct SharedPlanOf {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    WeightTile weights;                                     // P, then dS
    Element lse[BLOCK_Q], delta[BLOCK_Q];
};
template <> struct SharedPlanOf<true>
    : ScoreParts<SCORE_PARTS, ScoreGrid::GROUPS, ScoreGrid::M_TILES, ScoreGrid::N_TILES> {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    union {
        SmemTile<BLOCK_Q, HEAD_DIM> q;
        SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    };
    WeightTile weights;
    Element lse[BLOCK_Q], delta[BLOCK_Q];
};
using SharedPlan = SharedPlanOf<LOADS_IN_TURN>;
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// P = exp(scale S - lse) and dS = scale P (dP - delta) replace S and dP; both are 0 for masked
// pairs. With dropout P Z, and dS = scale P (Z dP - delta). lse = -inf means that all scores of the
// query are -inf: P is 0.
template <bool MASKED>
__device__ __forceinline__ void compute_p_and_ds(
    Scores& s, Scores& dp, const SharedPlan& shared, const ScoreTile& score_tile,
    Element scale) {
    using Pairs = FragmentGrid<ScoreGrid::M_TILES * 2, ScoreGrid::N_TILES * 2>;
    Pairs pairs{};
    if constexpr (DMOD)
        pairs = {
            score_tile.q_start + ScoreGrid::first_row() + query_row(0),
            score_tile.k_start + ScoreGrid::first_column() + static_cast<int>(threadIdx.x % 4 * 2)};
    ScoreMod<Element>::ArraySums<Pairs> sums;
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + m * 16 + query_row(half);
            const Element lse = effective_lse(shared.lse[row]);
            const Element rest = score_tile.rest(row, lse), delta = shared.delta[row];
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
                    Element &p = s[m][n][x], &ds = dp[m][n][x];
                    Derivatives<Element> derivatives;
                    if constexpr (LINEAR)
                        p = rounded(p, scale);
                    else
                        p = score_tile.score_mod.score(
                            p, score_tile.distance(row, key), query,
                            score_tile.k_start + key, derivatives);
                    p = exponential(p - lse - rest);
                    Element z = 1;
                    if constexpr (DROPOUT) z = score_tile.dropout.z_of(kept, n * 2 + x % 2);
                    const Element dx = p * ((DROPOUT ? z * ds : ds) - delta);
                    if (SUMS_SCORES && visible && ScoreGrid::part() == 0) {
                        score_tile.add_dbias(derivatives, dx, query, score_tile.k_start + key);
                        score_tile.score_mod.add_gradients(
                            sums, pairs, m * 2 + half, n * 2 + x % 2, derivatives, dx);
                    }
                    if (DBIAS && !visible && ScoreGrid::part() == 0)
                        score_tile.dbias.add_masked(query, score_tile.k_start + key);
                    ds = visible ? (BENDS ? dx * derivatives.by_product : dx) * scale : 0;
                    if (!visible) p = 0;
                    if constexpr (DROPOUT) p *= z;
                }
        }
    score_tile.score_mod.finish_gradients(sums, pairs);
}
