// sm80/forward.cu's iteration in C fragments: scores of a tile, the online softmax step, P V.
#pragma once
#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/softmax.cuh"
#include "score/dropout.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"
#include "sm80/online_softmax.cuh"

constexpr int THREADS = NUM_WARPS * 32, WARP_ROWS = BLOCK_Q / NUM_WARPS;
constexpr int M_TILES = WARP_ROWS / 16;                     // of the warp's rows
constexpr int S_TILES = BLOCK_K / 8, O_TILES = HEAD_DIM_V / 8;

static_assert(BLOCK_Q % (NUM_WARPS * 16) == 0, "a warp needs whole 16-row tiles of queries");
static_assert(BLOCK_K % 16 == 0, "P V takes 16 keys at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

using SoftmaxState = SoftmaxStateOf<M_TILES>;
using Scores = float[M_TILES][S_TILES][4];
using Output = float[M_TILES][O_TILES][4];

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

// S = Q K^T, or its negative if scale < 0: the softmax takes |scale|.
__device__ __forceinline__ void score_gemm(Scores& s, u32 q_smem, u32 k_smem) {
    set_zero(s);
    const int warp = threadIdx.x / 32;
    const OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES> queries(q_smem, warp * WARP_ROWS);
    const OperandB<BLOCK_K, Stored::TRANSPOSED, S_TILES / 2> keys(k_smem, 0);
    gemm<Element, HEAD_DIM / 16>(s, queries, keys);
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
    const int first_key = k_start + threadIdx.x % 4 * 2;
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
    const int first_key = k_start + threadIdx.x % 4 * 2;
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
    apply_dropout(p, query_tile.dropout, query_tile.first_query, k_start + threadIdx.x % 4 * 2);
}

// acc += P V. A NaN or an infinity in V would spread, as 0 * NaN, to queries that do not see its
// key. If there is one, this multiplies only finite values, and add_nonfinite_terms() adds the
// rest.
template <bool MASKED>
__device__ __forceinline__ void accumulate(
    Output& acc, const Scores& p, u32 v_smem, bool nonfinite) {
    using Values = OperandB<BLOCK_K, Stored::AS_NAMED, O_TILES / 2>;
    constexpr int KEY_BLOCKS = BLOCK_K / 16;
    const RegisterA<Element, M_TILES, S_TILES> weights(p);
    const Values values(v_smem, 0);
    if (MASKED && nonfinite)
        gemm<Element, KEY_BLOCKS, KEY_BLOCKS>(acc, weights, Sanitized<Element, Values>{values});
    else
        gemm<Element, KEY_BLOCKS, KEY_BLOCKS>(acc, weights, values);
}
