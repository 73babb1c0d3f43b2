// The online softmax step of a warp's rows, in C fragments: M tiles of 16 rows, N tiles of 8 keys,
// D tiles of 8 columns of V.
#pragma once
#include "common/online_softmax.cuh"
#include "sm80/mma.cuh"

// m: the row's maximum of scores. l: this lane's part of the row's sum of P.
template <int M> struct SoftmaxStateOf { float m[M][2], l[M][2]; };

template <int M> __device__ __forceinline__ void reset(SoftmaxStateOf<M>& softmax) {
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            softmax.m[i][half] = -infinity();
            softmax.l[i][half] = 0.0f;
        }
}

// The maximum of the lane's row of its fragments.
template <int N> __device__ __forceinline__ float row_max(const float (&s)[N][4], int half) {
    float m = s[0][half * 2];
    #pragma unroll
    for (int j = 0; j < N; ++j) m = fmaxf(fmaxf(m, s[j][half * 2]), s[j][half * 2 + 1]);
    return quad_max(m);
}

// The step of common/online_softmax.cuh: S becomes P. No barrier inside. SKIPS: acc is left alone
// where the factors of all the warp's rows are 1, which pays where a warp has few rows and many
// tiles.
// tile_max(i, half): the maximum of the lane's row in the tile.
template <bool SKIPS, int M, int N, int D, class TileMax>
__device__ __forceinline__ void softmax_step(
    float (&s)[M][N][4], SoftmaxStateOf<M>& softmax, float (&acc)[M][D][4], float scale_log2,
    TileMax tile_max) {
    const ScaledExp2 exp{scale_log2};
    float reference[M][2], factors[M][2];
    bool differ = false;
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            reference[i][half] = raise_max(
                exp, softmax.m[i][half], softmax.l[i][half],
                fmaxf(softmax.m[i][half], tile_max(i, half)),
                [&](float factor) {
                    if (!SKIPS) rescale_row(acc[i], half, factor);
                    factors[i][half] = factor;
                    differ |= factor != 1.0f;
                });
        }
    if (SKIPS && __ballot_sync(WHOLE_WARP, differ) != 0)
        #pragma unroll
        for (int i = 0; i < M; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) rescale_row(acc[i], half, factors[i][half]);
    #pragma unroll
    for (int i = 0; i < M; ++i)
        weigh<N * 4>(exp, reference[i], softmax.l[i],
                     [&](int n) -> float& { return s[i][n / 4][n % 4]; });
}

// The same of a warp that has all keys of its rows.
template <bool SKIPS = false, int M, int N, int D>
__device__ __forceinline__ void softmax_step(
    float (&s)[M][N][4], SoftmaxStateOf<M>& softmax, float (&acc)[M][D][4], float scale_log2) {
    softmax_step<SKIPS>(s, softmax, acc, scale_log2,
                        [&](int i, int half) { return row_max(s[i], half); });
}
