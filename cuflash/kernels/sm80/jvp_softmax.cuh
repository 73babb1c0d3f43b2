// sm80/jvp.cu's iteration in C fragments between the matmuls: scores and their tangents, masks, the
// online softmax step, dropout.
//
// P * W is rounded to 16 bits before it meets V: W is taken relative to a reference r of its row
// (score/row_reference.cuh), or rounding what all keys share would cost most digits.
#pragma once
#include "sm80/jvp_products.cuh"
#include "score/row_reference.cuh"

// r: the row's reference, 0 until the row has seen a key. b: this lane's part of the row's sum of
// P * (W - r), relative to the softmax's m as l is.
struct TangentState { float r[M_TILES][2], b[M_TILES][2]; };
using TangentStates = TangentState[DIRECTIONS];

__device__ __forceinline__ void reset(TangentStates& states) {
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v)
        for (int i = 0; i < M_TILES; ++i)
            for (int half = 0; half < 2; ++half)
                states[v].r[i][half] = states[v].b[i][half] = 0.0f;
}

// Calls f(i, j, x, query, key) for each of the lane's elements [i][j][x] of a tile of pairs.
template <class F>
__device__ __forceinline__ void for_each_pair(const QueryTile& query_tile, int k_start, F f) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x)
                    f(i, j, half * 2 + x, query_tile.first_query + i * 16 + half * 8,
                      first_key + j * 8 + x);
}

// Whether the query sees the key. No query past the last does, with PAIRWISE.
__device__ __forceinline__ bool sees(const QueryTile& query_tile, int query, int key) {
    const auto& mask = query_tile.mask;
    if (!mask.visible(query, key)) return false;
    if constexpr (PAIRWISE)
        return query < mask.seqlen_q && query_tile.pair_mask.visible(query, key);
    else
        return true;
}

// X becomes W of score/tangents.cuh and, not LINEAR, S becomes the scores of score_mod.cuh.
__device__ __forceinline__ void scores_and_tangents(
    Scores& s, ScoreTangents& x, const QueryTile& query_tile,
    const HeadTangent<float>& tangent, int k_start) {
    const ScoreMod<float>& score_mod = query_tile.score_mod;
    const int shift = query_tile.mask.seqlen_k - query_tile.mask.seqlen_q;
    for_each_pair(query_tile, k_start, [&](int i, int j, int n, int query, int key) {
        float& score = s[i][j][n];
        Derivatives<float> derivatives;
        if constexpr (!LINEAR)
            score = score_mod.score(
                score, static_cast<float>(query + shift - key), query, key, derivatives);
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            float& w = x[v][i][j][n];
            w = tangent.of(score_mod, derivatives, w * score_mod.scale, query, key, v);
        }
    });
}

// S = -inf and W = 0 where the query does not see the key.
__device__ __forceinline__ void apply_mask(
    Scores& s, ScoreTangents& w, const QueryTile& query_tile, int k_start) {
    for_each_pair(query_tile, k_start, [&](int i, int j, int n, int query, int key) {
        if (sees(query_tile, query, key)) return;
        s[i][j][n] = -infinity();
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) w[v][i][j][n] = 0.0f;
    });
}

// r of the rows that see their first keys in this tile, of which `begins` tells: the mean of W over
// them, weighted by P; 0 if that is not finite. l: the lane's parts of the sums of P.
__device__ __forceinline__ void set_references(
    TangentState& state, const Scores& p, const Scores& w, const float (&l)[M_TILES][2],
    const bool (&begins)[M_TILES][2]) {
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                sum += p[i][j][half * 2] * w[i][j][half * 2]
                     + p[i][j][half * 2 + 1] * w[i][j][half * 2 + 1];
            const float mean = quad_sum(sum) / quad_sum(l[i][half]);
            if (begins[i][half] && is_reference(mean)) state.r[i][half] = mean;
        }
}

// The step of softmax_step() for both sums: S becomes P, W becomes P * (W - r), and b is the sum of
// that. No barrier inside.
__device__ __forceinline__ void tangent_step(
    Scores& s, ScoreTangents& w, SoftmaxState& softmax, TangentStates& states, Output& acc,
    OutputTangents& acc_dot, float scale_log2) {
    float m_old[M_TILES][2];
    bool begins[M_TILES][2], any = false;
    for (int i = 0; i < M_TILES; ++i)
        for (int half = 0; half < 2; ++half) m_old[i][half] = softmax.m[i][half];
    softmax_step(s, softmax, acc, scale_log2);
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float factor = exp2_of_product(
                m_old[i][half], scale_log2, finite_reference(softmax.m[i][half], scale_log2));
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) {
                states[v].b[i][half] *= factor;
                rescale_row(acc_dot[v][i], half, factor);
            }
            begins[i][half] = m_old[i][half] == -infinity();
            any |= begins[i][half];
        }
    if constexpr (!SCORES_MOVE) return;
    if (__ballot_sync(WHOLE_WARP, any) != 0)
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v)
            set_references(states[v], s, w[v], softmax.l, begins);
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v)
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 4; ++x) {
                    w[v][i][j][x] = s[i][j][x] * (w[v][i][j][x] - states[v].r[i][x / 2]);
                    states[v].b[i][x / 2] += w[v][i][j][x];
                }
}

// P = P Z and P * W = P * W Z: 0 where dropout drops the pair, larger elsewhere.
__device__ __forceinline__ void apply_dropout(
    Scores& p, ScoreTangents& pw, const QueryTile& query_tile, int k_start) {
    const Dropout<float>& dropout = query_tile.dropout;
    for_each_kept<M_TILES, S_TILES>(
        dropout, query_tile.first_query, k_start + threadIdx.x % 4 * 2,
        [&](int i, int half, u32 kept) {
            apply_dropout(p[i], half, kept, dropout);
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) apply_dropout(pw[v][i], half, kept, dropout);
        });
}

// What value_gemms<true>() left out: for the pairs that are visible, the weights' products with the
// NaNs and infinities of `values`, a tile in shared memory. Whole warp; slow, rare.
__device__ __forceinline__ void add_nonfinite_terms(
    Output& sum, const Scores& weights, const unsigned char* values, const QueryTile& query_tile,
    int k_start) {
    Scores p;                                               // in local memory: j is a variable
    for (int i = 0; i < M_TILES; ++i)
        for (int j = 0; j < S_TILES; ++j)
            for (int x = 0; x < 4; ++x) p[i][j][x] = weights[i][j][x];
    const int first_column = warp_column() + threadIdx.x % 4 * 2, quad = threadIdx.x % 32 / 4 * 4;
    #pragma unroll 1
    for (int j = 0; j < BLOCK_K; ++j)
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float weight = __shfl_sync(
                    WHOLE_WARP, p[i][j / 8][half * 2 + j % 2], quad + j % 8 / 2);
                const int query = query_tile.first_query + i * 16 + half * 8;
                if (!sees(query_tile, query, k_start + j)) continue;
                #pragma unroll
                for (int n = 0; n < O_TILES; ++n) {
                    const u32 pair = *reinterpret_cast<const u32*>(
                        values + tile_offset<BLOCK_K>(j, first_column + n * 8));
                    if (nonfinite_bits<Element>(pair) == 0) continue;
                    const float x[2] = {to_float(low_half<Element>(pair)),
                                        to_float(high_half<Element>(pair))};
                    for (int c = 0; c < 2; ++c)
                        if (!(fabsf(x[c]) < infinity())) sum[i][n][half * 2 + c] += weight * x[c];
                }
            }
}
