// sm80/double_backward.cu's tile of pairs in C fragments: what BLOCK_Q queries and BLOCK_K keys
// contribute. The equations are those of simt/double_backward.cuh.
#pragma once
#include "sm80/backward_scores.cuh"
#include "sm80/gemm_pair.cuh"
#include "score/tangents.cuh"

// D = A B^T and D' = A' B^T + A B'^T, of which A' and B' may be missing.
template <int COLUMNS, bool A_DOT, bool B_DOT>
__device__ __forceinline__ void pair_gemms(
    Scores& d, Scores& d_dot, u32 a_tile, u32 a_dot_tile, u32 b_tile, u32 b_dot_tile) {
    const int first_row = ScoreGrid::first_row(), first_column = ScoreGrid::first_column();
    set_zero(d);
    set_zero(d_dot);
    const ScoreRows a(a_tile, first_row), a_dot(a_dot_tile, first_row);
    if constexpr (ScoreGrid::N_TILES > 1) {
        using ScoreColumns = OperandB<BLOCK_K, Stored::TRANSPOSED, ScoreGrid::N_TILES / 2>;
        gemm_pair<Element, COLUMNS / 16, A_DOT, B_DOT>(
            d, d_dot, a, a_dot, ScoreColumns(b_tile, first_column),
            ScoreColumns(b_dot_tile, first_column));
    } else {
        gemm_pair_narrow<Element, COLUMNS / 16, A_DOT, B_DOT>(
            d, d_dot, a, a_dot, NarrowB<BLOCK_K>(b_tile, first_column),
            NarrowB<BLOCK_K>(b_dot_tile, first_column));
    }
}

// Calls f(i, j, x, row, key) for each of the lane's elements [i][j][x]: a row of the tile, a key of
// the array.
template <class F>
__device__ __forceinline__ void for_each_pair(const ScoreTile& score_tile, F f) {
    const int first_row = ScoreGrid::first_row() + threadIdx.x % 32 / 4;
    const int first_key = lane_key(score_tile);
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x)
                    f(i, j, half * 2 + x, first_row + i * 16 + half * 8, first_key + j * 8 + x);
}

// Of each row of a tile of queries, in shared memory: lse, D, b and F.
struct RowStatistics { float lse[BLOCK_Q], delta[BLOCK_Q], b[BLOCK_Q], product[BLOCK_Q]; };

// Of each pair, where scores BEND: slopes by scale S and by a bias, and a PairMotion.
struct PairMotions { Scores slopes, bias_slopes, bends, bias_bends, arguments, x_dots; };

// P and W - b. S becomes the one, X / scale = Q' K^T + Q K'^T the other.
__device__ __forceinline__ void probabilities_and_tangents(
    Scores& s, Scores& x, PairMotions& motions, const RowStatistics& rows,
    const ScoreTile& score_tile, const HeadTangent<float>& tangent) {
    const ScoreMod<float>& score_mod = score_tile.score_mod;
    const int shift = score_tile.mask.seqlen_k - score_tile.mask.seqlen_q;
    for_each_pair(score_tile, [&](int i, int j, int n, int row, int key) {
        const int query = score_tile.q_start + row;
        const float lse = effective_lse(rows.lse[row]), product = s[i][j][n];
        Derivatives<float> derivatives;
        if constexpr (LINEAR) {
            s[i][j][n] = weight(product, score_mod.scale, lse);
        } else {
            const float score = score_mod.score(
                product, static_cast<float>(query + shift - key), query, key, derivatives);
            s[i][j][n] = weight_beside(score_tile.rest(row, lse), score, lse);
        }
        const PairMotion<float> motion = tangent.motion(
            score_mod, derivatives, product, x[i][j][n] * score_mod.scale, query, key);
        x[i][j][n] = motion.w - rows.b[row];
        if constexpr (BENDS) {
            motions.slopes[i][j][n] = derivatives.by_product;
            motions.bias_slopes[i][j][n] = derivatives.by_bias;
            motions.bends[i][j][n] = motion.bend;
            motions.bias_bends[i][j][n] = motion.bias_bend;
            motions.arguments[i][j][n] = motion.argument;
            motions.x_dots[i][j][n] = motion.x_dot;
        }
    });
}

// dS = P (dP - D),  T = dS (W - b) + P (U - F),  P (W - b): dP, U and W - b become these.
__device__ __forceinline__ void second_weights(
    const Scores& p, Scores& w, Scores& dp, Scores& u, const RowStatistics& rows,
    const ScoreTile& score_tile) {
    for_each_pair(score_tile, [&](int i, int j, int n, int row, int) {
        const float weight = p[i][j][n], ds = weight * (dp[i][j][n] - rows.delta[row]);
        u[i][j][n] = ds * w[i][j][n] + weight * (u[i][j][n] - rows.product[row]);
        dp[i][j][n] = ds;
        w[i][j][n] *= weight;
    });
}

// T and dS by scale S (SecondScores), instead of T and dS. Adds the lane's, 0 of masked pairs, to
// the sums of second gradients of a bias and of the user's arrays. Whole warp.
__device__ __forceinline__ void second_scores(
    Scores& t, Scores& ds, const PairMotions& motions, const ScoreTile& score_tile) {
    const int first_query = lane_query(score_tile), first_key = lane_key(score_tile);
    using Pairs = FragmentGrid<ScoreGrid::M_TILES * 2, ScoreGrid::N_TILES * 2>;
    const Pairs pairs{first_query, first_key};
    ScoreMod<float>::ArraySums<Pairs> sums;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x) {
                PairMotion<float> motion{0.0f};
                float slope = 1.0f, bias_slope = 1.0f;
                if constexpr (BENDS) {
                    slope = motions.slopes[i][j][x];
                    bias_slope = motions.bias_slopes[i][j][x];
                    motion = {0.0f, motions.bends[i][j][x], motions.bias_bends[i][j][x],
                              motions.arguments[i][j][x], motions.x_dots[i][j][x]};
                }
                const float own_t = t[i][j][x], own_ds = ds[i][j][x];
                const SecondScores<float> second(own_t, own_ds, slope, bias_slope, motion);
                if constexpr (DBIAS)
                    score_tile.dbias.add(first_query + i * 16 + x / 2 * 8,
                                         first_key + j * 8 + x % 2, second.t_bias);
                score_tile.score_mod.add_second_gradients(
                    sums, pairs, i * 2 + x / 2, j * 2 + x % 2, motion, own_t, own_ds);
                t[i][j][x] = second.tx;
                ds[i][j][x] = second.ds;
            }
    score_tile.score_mod.finish_gradients(sums, pairs);
}

// Rounds to a tile of shared memory what the tile's pairs contribute; 0 of masked pairs.
template <bool MASKED>
__device__ __forceinline__ void store_weights(u32 tile, Scores& x, const ScoreTile& score_tile) {
    if constexpr (MASKED) apply_mask(x, score_tile);
    PackedScores packed;
    pack_fragments<Element>(packed, x);
    store_scores(tile, packed);
}
