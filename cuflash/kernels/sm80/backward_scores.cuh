// sm80/backward.cu's tile of scores: P and dS of BLOCK_Q queries and BLOCK_K keys, in C fragments.
//
//     P = exp(scale S - lse),  dS = P (dP - delta)         and dS / scale with options:
//     P = exp(x - lse), dS = P (Z dP - delta) dx/d(scale S), dV from P Z
//
// for the score x of score_mod.cuh and the factors Z of dropout.cuh.
#pragma once
#include "common/dq_accum.cuh"
#include "common/softmax.cuh"
#include "score/score_tile.cuh"
#include "sm80/mma.cuh"

// S, dP: by all warps, or, of few keys, by as many as get 8 of them.
constexpr int SCORE_WARPS_K =
    NUM_WARPS / SCORE_WARPS_Q * 8 <= BLOCK_K ? NUM_WARPS / SCORE_WARPS_Q : BLOCK_K / 8;
constexpr int SCORE_WARPS = SCORE_WARPS_Q * SCORE_WARPS_K;
using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q, SCORE_WARPS_K>;
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV

using Scores = ScoreGrid::Fragments;
using ScoreRows = OperandA<BLOCK_Q, Stored::AS_NAMED, ScoreGrid::M_TILES>;
using PackedScores = Packed<ScoreGrid::M_TILES, ScoreGrid::N_TILES>;

// The lane's first query and key in its C fragments.
__device__ __forceinline__ int lane_query(const ScoreTile& score_tile) {
    return score_tile.q_start + ScoreGrid::first_row() + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int lane_key(const ScoreTile& score_tile) {
    return score_tile.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2;
}

// d = A B^T, for S = Q K^T and dP = dO V^T.
template <int COLUMNS>
__device__ __forceinline__ void score_gemm(Scores& d, u32 a_tile, u32 b_tile) {
    set_zero(d);
    gemm_transposed<Element, COLUMNS, BLOCK_K>(
        d, ScoreRows(a_tile, ScoreGrid::first_row()), b_tile, ScoreGrid::first_column());
}

// The derivatives of scores (score_mod.cuh), where they BEND.
struct ScoreDerivatives { Scores by_product, by_bias, argument; };

// P = exp(scale S - lse), or of the modified scores. S becomes P.
__device__ __forceinline__ void probabilities(
    Scores& s, ScoreDerivatives& derivatives, u32 lse_rows, const ScoreTile& score_tile) {
    const int shift = score_tile.mask.seqlen_k - score_tile.mask.seqlen_q;
    const int first_key = lane_key(score_tile);
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            const float lse = effective_lse(load_shared_float(lse_rows + row * 4));
            const float rest = score_tile.rest(row, lse);
            const float distance = static_cast<float>(score_tile.q_start + row + shift - first_key);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int x = half * 2; x < half * 2 + 2; ++x)
                    if constexpr (LINEAR) {
                        s[i][j][x] = weight(s[i][j][x], score_tile.score_mod.scale, lse);
                    } else {
                        Derivatives<float> of_pair;
                        const float score = score_tile.score_mod.score(
                            s[i][j][x], distance - static_cast<float>(j * 8 + x % 2),
                            score_tile.q_start + row, first_key + j * 8 + x % 2, of_pair);
                        derivatives.by_product[i][j][x] = of_pair.by_product;
                        derivatives.by_bias[i][j][x] = of_pair.by_bias;
                        derivatives.argument[i][j][x] = of_pair.argument;
                        s[i][j][x] = weight_beside(rest, score, lse);
                    }
        }
}

// Which of the lane's pairs dropout keeps, of each of its queries.
using KeptBits = u32[ScoreGrid::M_TILES][2];

__device__ __forceinline__ void find_kept(KeptBits& bits, const ScoreTile& score_tile) {
    for_each_kept<ScoreGrid::M_TILES, ScoreGrid::N_TILES>(
        score_tile.dropout, lane_query(score_tile), lane_key(score_tile),
        [&](int i, int half, u32 kept) { bits[i][half] = kept; });
}

// x times Z, as dropout.cuh's, but column by column: row by row takes one more register.
__device__ __forceinline__ void apply_dropout(
    Scores& x, const KeptBits& kept, const ScoreTile& score_tile) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int k = 0; k < 4; ++k)
                x[i][j][k] *= score_tile.dropout.z_of(kept[i][k / 2], j * 2 + k % 2);
}

__device__ __forceinline__ void copy(Scores& target, const Scores& source) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int k = 0; k < 4; ++k) target[i][j][k] = source[i][j][k];
}

__device__ __forceinline__ void multiply(Scores& x, const Scores& factors) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int k = 0; k < 4; ++k) x[i][j][k] *= factors[i][j][k];
}

// Sets P or dS to 0, whatever its value, where the pair is masked or the row is past seqlen_q.
__device__ __forceinline__ void apply_mask(Scores& x, const ScoreTile& score_tile) {
    const int first_query = lane_query(score_tile), first_key = lane_key(score_tile);
    const auto& mask = score_tile.mask;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + i * 16 + half * 8;
            const int num_keys = query < mask.seqlen_q ? mask.num_keys(query) : 0;
            const int first_visible = mask.first_key(query);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int key = first_key + j * 8 + k;
                    if (key >= num_keys) x[i][j][half * 2 + k] = 0.0f;
                    if (WINDOW && key < first_visible) x[i][j][half * 2 + k] = 0.0f;
                    if constexpr (PAIRWISE)
                        if (key < num_keys && !score_tile.pair_mask.visible(query, key))
                            x[i][j][half * 2 + k] = 0.0f;
                }
        }
}

// dS = P (dP - delta), from the rounded P (times the scores' derivatives where they BEND). dP
// becomes dS.
__device__ __forceinline__ void score_gradients(Scores& dp, const PackedScores& p, u32 delta_rows) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            const float delta = load_shared_float(delta_rows + row * 4);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j) {
                float &low = dp[i][j][half * 2], &high = dp[i][j][half * 2 + 1];
                low = to_float(low_half<Element>(p[i][j][half])) * (low - delta);
                high = to_float(high_half<Element>(p[i][j][half])) * (high - delta);
            }
        }
}

// Adds the lane's dS, the gradients of scores, to the sums of dbias and of the user's arrays.
__device__ __forceinline__ void add_score_gradients(
    const Scores& ds, const ScoreDerivatives& derivatives, const ScoreTile& score_tile) {
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
                const Derivatives<float> of_pair{
                    derivatives.by_product[i][j][x], derivatives.by_bias[i][j][x],
                    derivatives.argument[i][j][x]};
                score_tile.add_dbias(of_pair, ds[i][j][x], first_query + i * 16 + x / 2 * 8,
                                     first_key + j * 8 + x % 2);
                score_tile.score_mod.add_gradients(
                    sums, pairs, i * 2 + x / 2, j * 2 + x % 2, of_pair, ds[i][j][x]);
            }
    score_tile.score_mod.finish_gradients(sums, pairs);
}

// To a tile, from its column `column` on.
__device__ __forceinline__ void store_scores(
    u32 tile, const PackedScores& packed, int column = 0) {
    store_fragments<BLOCK_Q>(
        tile, packed, ScoreGrid::first_row(), column + ScoreGrid::first_column());
}
