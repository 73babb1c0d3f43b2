// A block's queries in forward passes (fma/forward.cu, fma/jvp.cu): BLOCK_Q of one head, of which
// each warp has whole rows; fma.cuh defines which lane holds which numbers.
//
// HEAD_DIM and HEAD_DIM_V are multiples of 32.
#pragma once
#include "fma/fma.cuh"
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "score/pair_mask.cuh"

constexpr int WARP_ROWS = BLOCK_Q / NUM_WARPS;
constexpr int ROWS = WARP_ROWS / LANE_ROWS, KEYS = BLOCK_K / LANE_COLUMNS;
constexpr int COLUMNS = HEAD_DIM_V / LANE_COLUMNS;

static_assert(BLOCK_Q % (NUM_WARPS * LANE_ROWS) == 0, "every lane has as many rows");
static_assert(BLOCK_K % WEIGHT_KEYS == 0, "weights are exchanged WEIGHT_KEYS at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

using Scores = float[ROWS][KEYS];
using Output = float[ROWS][COLUMNS];

// The maximum, which skips NaN, and the sum over the eight lanes of a row, in each of them.
__device__ __forceinline__ float row_max(float x) {
    #pragma unroll
    for (int distance = 2; distance < 16; distance *= 2)
        x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}
__device__ __forceinline__ float row_sum(float x) {
    #pragma unroll
    for (int distance = 2; distance < 16; distance *= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// The step of online_softmax.cuh for the lane's rows: S becomes P. rescale(i, factor): multiplies
// what is relative to m of row i, but for l. No barrier inside.
template <class Rescale>
__device__ __forceinline__ void softmax_step(
    Scores& s, float (&m)[ROWS], float (&l)[ROWS], float scale_log2, Rescale rescale) {
    const ScaledExp2 exp{scale_log2};
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float top = s[i][0];
        #pragma unroll
        for (int j = 1; j < KEYS; ++j) top = fmaxf(top, s[i][j]);
        const float reference[1] = {raise_max(
            exp, m[i], l[i], fmaxf(m[i], row_max(top)), [&](float factor) { rescale(i, factor); })};
        weigh<KEYS>(exp, reference, one(l[i]), [&](int j) -> float& { return s[i][j]; });
    }
}

// The lane's row i and key j of the tile: whether the query sees the key.
struct LaneVisibility {
    const Mask<CAUSAL, WINDOW>& mask;
    const PairMask& pair_mask;
    const Shape& shape;
    const int &first_query, &k_start;
    __device__ __forceinline__ bool operator()(int i, int j) const {
        const int query = first_query + i * LANE_ROWS, key = k_start + j;
        if (WINDOW && key < mask.first_key(query)) return false;
        if constexpr (PAIRWISE)
            if (query < shape.seqlen_q && key < shape.seqlen_k && !pair_mask.visible(query, key))
                return false;
        return key < mask.num_keys(query);
    }
};
