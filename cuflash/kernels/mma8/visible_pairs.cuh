// Partly masked tiles of mma8/forward.cu and mma8/jvp.cu: which pairs a warp's query rows see, and
// O += P V over those alone.
#pragma once
#include "mma8/mma8.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"

// The lane's `row` and the tile's `key`: whether the query sees the key.
struct LaneVisibility {
    const Mask<CAUSAL, WINDOW>& mask;
    const PairMask& pair_mask;
    const Shape& shape;
    const int &first_query, &k_start;
    __device__ __forceinline__ bool operator()(int row, int key) const {
        const int query = first_query + row;
        if (WINDOW && k_start + key < mask.first_key(query)) return false;
        if (PAIRWISE && query < shape.seqlen_q && k_start + key < shape.seqlen_k
            && !pair_mask.visible(query, k_start + key)) return false;
        return k_start + key < mask.num_keys(first_query + row);
    }
};

// acc += P V over visible pairs only, on CUDA cores: for a partly masked tile whose V has a NaN or
// an infinity, since 0 * NaN is NaN. Slow, rare.
template <int M, int KEY_TILES, int N>
__device__ __forceinline__ void add_visible_rows(
    Element (&acc)[M][N][4], const Element (&p)[M][KEY_TILES][4],
    const SmemTile<BLOCK_K, HEAD_DIM_V, VALUES_PAD>& v, const LaneVisibility& visible,
    int first_column = 0) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < KEY_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x)
                #pragma unroll 1
                for (int owner = 0; owner < 4; ++owner) {   // of the quad: has key 8j + 2 owner + x
                    const int key = j * 8 + 2 * owner + x;
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const Element weight = __shfl_sync(
                            WHOLE_WARP, p[i][j][half * 2 + x], lane / 4 * 4 + owner);
                        if (!visible(i * 16 + half * 8, key)) continue;
                        #pragma unroll
                        for (int n = 0; n < N; ++n)
                            #pragma unroll
                            for (int c = 0; c < 2; ++c) {
                                const int column = first_column + n / CHUNK * (8 * CHUNK)
                                                 + CHUNK * (2 * t + c) + n % CHUNK;
                                Element& sum = acc[i][n][half * 2 + c];
                                sum = fma(weight, v.at[key][column], sum);
                            }
                    }
                }
}
