// sm80/forward.cu's iteration in C fragments: scores of a tile, the online softmax step, P V.
#pragma once
#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/softmax.cuh"
#include "score/dropout.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"
#include "sm80/online_softmax.cuh"

// Warps share the queries; with WARPS_ACROSS > 1 also the columns of O and the keys of S, or, in
// SCORE_PARTS, the columns that S sums over (score_parts.cuh).
constexpr int THREADS = NUM_WARPS * 32, WARPS_ACROSS = NUM_WARPS / SCORE_WARPS_Q;
constexpr int WARP_ROWS = BLOCK_Q / SCORE_WARPS_Q, WARP_KEYS = BLOCK_K * SCORE_PARTS / WARPS_ACROSS;
constexpr int WARP_COLUMNS = HEAD_DIM_V / WARPS_ACROSS;
constexpr int M_TILES = WARP_ROWS / 16;                     // of the warp's rows
constexpr int S_TILES = WARP_KEYS / 8, O_TILES = WARP_COLUMNS / 8;

static_assert(NUM_WARPS % SCORE_WARPS_Q == 0, "the warps form a rectangle");
static_assert(BLOCK_Q % (SCORE_WARPS_Q * 16) == 0, "a warp needs whole 16-row tiles of queries");
static_assert(WARP_KEYS % 8 == 0 && WARP_COLUMNS % 16 == 0, "a warp needs whole fragments");
static_assert(BLOCK_K % 16 == 0, "P V takes 16 keys at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

using SoftmaxState = SoftmaxStateOf<M_TILES>;
using Scores = float[M_TILES][S_TILES][4];
using Output = float[M_TILES][O_TILES][4];

// The warp's place among those that share the same rows, and its first row, key and column. (Where
// forward.cu computes a row itself, this would change the machine code of WARPS_ACROSS = 1.)
__device__ __forceinline__ int warp_across() {
    return WARPS_ACROSS == 1 ? 0 : threadIdx.x / 32 / SCORE_WARPS_Q;
}
__device__ __forceinline__ int warp_row() {
    const int warp = threadIdx.x / 32;
    return (WARPS_ACROSS == 1 ? warp : warp % SCORE_WARPS_Q) * WARP_ROWS;
}
__device__ __forceinline__ int warp_key() {
    return SCORE_PARTS > 1 ? 0 : warp_across() * WARP_KEYS;
}
__device__ __forceinline__ int warp_column() { return warp_across() * WARP_COLUMNS; }

// The lane's queries: which keys they see and how their scores are made. LINEAR scores are kept as
// S, and the exponent scales them; others are the scores of score_mod.cuh.
struct QueryTile {
    Mask<CAUSAL, WINDOW> mask;
    float scale_log2;                                       // |scale| log2(e); not LINEAR: log2(e)
    int first_query;                                        // the lane's first query
    ScoreMod<float> score_mod;
    PairMask pair_mask;
    Dropout<float> dropout;

    __device__ __forceinline__ QueryTile(const Arguments& args, TileCoord coord, int first_query)
        : mask{arrays_of(args).shape.seqlen_q, arrays_of(args).shape.seqlen_k,
               window_of<WINDOW>(args)},
          scale_log2(exponent_scale<LINEAR>(arrays_of(args).scale)),
          first_query(first_query), score_mod(args), pair_mask(args, coord.batch), dropout(args) {
        score_mod.set_head(args, coord.batch, coord.head);
        pair_mask.set_head(coord.head);
        dropout.set_head(coord.batch, coord.head);
    }
};

// The lane's first key of the tile at k_start.
__device__ __forceinline__ int lane_key(int k_start) {
    return k_start + warp_key() + threadIdx.x % 4 * 2;
}

// S = Q K^T, or its negative if scale < 0: the softmax takes |scale|.
__device__ __forceinline__ void score_gemm(Scores& s, u32 q_smem, u32 k_smem) {
    set_zero(s);
    const OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES> queries(q_smem, warp_row());
    gemm_transposed<Element, HEAD_DIM, BLOCK_K>(s, queries, k_smem, warp_key());
    if (NEGATE_SCORES)
        for (auto& tile : s)
            for (auto& fragment : tile)
                for (float& x : fragment) x = -x;
}

// S becomes the scores of score_mod.cuh.
__device__ __forceinline__ void apply_score_mod(
    Scores& s, const QueryTile& query_tile, int k_start) {
    const ScoreMod<float>& score_mod = query_tile.score_mod;
    const int shift = query_tile.mask.seqlen_k - query_tile.mask.seqlen_q;
    const int first_key = lane_key(k_start);
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = query_tile.first_query + i * 16 + half * 8;
            const float distance = static_cast<float>(query + shift - first_key);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    float& score = s[i][j][half * 2 + x];
                    score = score_mod.score(score, distance - static_cast<float>(j * 8 + x), query,
                                            first_key + j * 8 + x);
                }
        }
}

// S = -inf where the query does not see the key.
__device__ __forceinline__ void apply_mask(Scores& s, const QueryTile& query_tile, int k_start) {
    const auto& mask = query_tile.mask;
    const int first_key = lane_key(k_start);
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = query_tile.first_query + i * 16 + half * 8;
            const int num_keys = mask.num_keys(query);
            const int first_visible = mask.first_key(query);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int key = first_key + j * 8 + x;
                    if (key >= num_keys) s[i][j][half * 2 + x] = -infinity();
                    if (WINDOW && key < first_visible) s[i][j][half * 2 + x] = -infinity();
                    if constexpr (PAIRWISE)
                        if (query < mask.seqlen_q && key < num_keys
                            && !query_tile.pair_mask.visible(query, key))
                            s[i][j][half * 2 + x] = -infinity();
                }
        }
}

// P = P Z: 0 where dropout drops the pair, larger elsewhere.
__device__ __forceinline__ void apply_dropout(
    Scores& p, const QueryTile& query_tile, int k_start) {
    apply_dropout(p, query_tile.dropout, query_tile.first_query, lane_key(k_start));
}

// acc += P V. A NaN or an infinity in V would spread, as 0 * NaN, to queries that do not see its
// key. If there is one, this multiplies only finite values, and add_nonfinite_terms() adds the
// rest.
template <bool MASKED, class Weights>
__device__ __forceinline__ void accumulate(
    Output& acc, const Weights& weights, u32 v_smem, bool nonfinite) {
    using Values = OperandB<BLOCK_K, Stored::AS_NAMED, O_TILES / 2>;
    constexpr int KEY_BLOCKS = BLOCK_K / 16;
    const Values values(v_smem, warp_column());
    if (MASKED && nonfinite)
        gemm<Element, KEY_BLOCKS, KEY_BLOCKS>(acc, weights, Sanitized<Element, Values>{values});
    else
        gemm<Element, KEY_BLOCKS, KEY_BLOCKS>(acc, weights, values);
}
