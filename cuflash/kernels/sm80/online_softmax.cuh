// The online softmax step of a warp's rows, in C fragments: M tiles of 16 rows, N tiles of 8 keys,
// D tiles of 8 columns of V.
#pragma once
#include "common/softmax.cuh"
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

template <int D>
__device__ __forceinline__ void rescale_row(float (&acc)[D][4], int half, float factor) {
    #pragma unroll
    for (int j = 0; j < D; ++j) {
        acc[j][half * 2] *= factor;
        acc[j][half * 2 + 1] *= factor;
    }
}

// m = max(m_old, rowmax(S)),  P = 2^(c S - c m),  l = l 2^(c m_old - c m) + rowsum(P),  acc scaled
// by the same factor (FlashAttention-2, Alg. 1, lines 9 and 10), c = scale_log2. S becomes P. No
// barrier inside. SKIPS: acc is left alone where the factors of all the warp's rows are 1, which
// pays where a warp has few rows and many tiles.
template <bool SKIPS = false, int M, int N, int D>
__device__ __forceinline__ void softmax_step(
    float (&s)[M][N][4], SoftmaxStateOf<M>& softmax, float (&acc)[M][D][4], float scale_log2) {
    float reference[M][2], factors[M][2];
    bool differ = false;
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float m = s[i][0][half * 2];
            #pragma unroll
            for (int j = 0; j < N; ++j)
                m = fmaxf(fmaxf(m, s[i][j][half * 2]), s[i][j][half * 2 + 1]);
            const float m_old = softmax.m[i][half];
            m = fmaxf(m_old, quad_max(m));
            reference[i][half] = finite_reference(m, scale_log2);
            const float rescale = exp2_of_product(m_old, scale_log2, reference[i][half]);
            softmax.m[i][half] = m;
            softmax.l[i][half] *= rescale;
            if (!SKIPS) rescale_row(acc[i], half, rescale);
            factors[i][half] = rescale;
            differ |= rescale != 1.0f;
        }
    if (SKIPS && __ballot_sync(WHOLE_WARP, differ) != 0)
        #pragma unroll
        for (int i = 0; i < M; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) rescale_row(acc[i], half, factors[i][half]);
    #pragma unroll
    for (int i = 0; i < M; ++i) {
        float sum[2] = {0.0f, 0.0f};                        // see sm90/forward_softmax.cuh
        #pragma unroll
        for (int j = 0; j < N; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x) {
                s[i][j][x] = exp2_of_product(s[i][j][x], scale_log2, reference[i][x / 2]);
                sum[x / 2] += s[i][j][x];
            }
        softmax.l[i][0] += sum[0];
        softmax.l[i][1] += sum[1];
    }
}
