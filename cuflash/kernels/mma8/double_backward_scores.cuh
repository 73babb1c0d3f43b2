// The weights of a tile of BLOCK_Q queries and BLOCK_K keys, for mma8/double_backward.cu and
// mma8/double_backward_roles.cu.
#pragma once
#include "mma8/warp_grids.cuh"
#include "score/score_tile.cuh"
#include "score/tangents.cuh"

struct SharedWeights { WeightTile weights; };             // as gradient_gemm() takes them

// What a warp knows of its pairs: in turn S, then Z P (W - b); X' / scale, then T_X; dP, then g dS;
// U. T_X and g dS come with the factor scale of d2Q and d2K.
struct Weights { Scores p_dot, tx, ds, u; };

// The weights of the equations of double_backward.cu, 0 for masked pairs, from their products.
// `rows` holds lse, delta, b and delta_dot. lse = -inf means that all scores of the query are -inf:
// P is 0.
template <bool MASKED, class Rows>
__device__ __forceinline__ void compute_weights(
    Weights& x, const Rows& rows, const ScoreTile& score_tile,
    const HeadTangent<Element>& tangent) {
    const ScoreMod<Element>& score_mod = score_tile.score_mod;
    const int first_key = ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    using Pairs = FragmentGrid<ScoreGrid::M_TILES * 2, ScoreGrid::N_TILES * 2>;
    Pairs pairs{};
    if constexpr (DMOD)
        pairs = {score_tile.q_start + ScoreGrid::first_row() + query_row(0),
                 score_tile.k_start + first_key};
    ScoreMod<Element>::ArraySums<Pairs> sums;
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + m * 16 + query_row(half);
            const int i = score_tile.q_start + row;
            const Element lse = effective_lse(rows.lse[row]), delta = rows.delta[row];
            const Element b = rows.b[row], delta_dot = rows.delta_dot[row];
            const Element rest = score_tile.rest(row, lse);
            u32 kept = 0;
            if constexpr (DROPOUT)
                kept = score_tile.dropout.kept_bits<ScoreGrid::N_TILES>(
                    i, score_tile.k_start + first_key);
            #pragma unroll
            for (int n = 0; n < ScoreGrid::N_TILES; ++n)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int key = first_key + n * 8 + c, j = score_tile.k_start + key;
                    Element &s = x.p_dot[m][n][half * 2 + c], &w = x.tx[m][n][half * 2 + c];
                    Element &dp = x.ds[m][n][half * 2 + c], z = 1;
                    Derivatives<Element> derivatives;
                    const Element u = x.u[m][n][half * 2 + c];
                    if constexpr (DROPOUT) z = score_tile.dropout.z_of(kept, n * 2 + c);
                    const Element score = score_mod.score(
                        s, score_tile.distance(row, key), i, j, derivatives);
                    const Element slope = derivatives.by_product;
                    const Element p = exponential(score - lse - rest), x_dot = score_mod.scale * w;
                    const PairMotion<Element> motion =
                        tangent.motion(score_mod, derivatives, s, x_dot, i, j);
                    const Element relative = motion.w - b;  // W - b
                    const Element ds = p * ((DROPOUT ? z * dp : dp) - delta);
                    const Element t = ds * relative + p * ((DROPOUT ? z * u : u) - delta_dot);
                    const bool visible = !MASKED || score_tile.visible(row, key);
                    const SecondScores<Element> second(
                        t, ds, slope, derivatives.by_bias, motion);
                    if constexpr (DBIAS) if (visible) score_tile.dbias.add(i, j, second.t_bias);
                    if constexpr (DMOD)
                        score_mod.add_second_gradients(
                            sums, pairs, m * 2 + half, n * 2 + c, motion, visible ? t : 0,
                            visible ? ds : 0);
                    s = visible ? (DROPOUT ? z * p : p) * relative : 0;
                    w = visible ? second.tx * score_mod.scale : 0;
                    dp = visible ? second.ds * score_mod.scale : 0;
                }
        }
    score_mod.finish_gradients(sums, pairs);
}
