// What a softmax on mma C fragments is made of. Of each 16-row tile lane l holds rows l / 4 and
// l / 4 + 8, each shared by the four lanes of a quad: a row's maximum or sum is that of its lanes'.
#pragma once
#include "common/ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

// The maximum, which skips NaN, and the sum over a quad's lanes, in each of them.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// 2^(score * c - reference) with the product rounded by itself, as the reference was: the row's
// maximum has weight 1 exactly, every other at most 1. A fused multiply-add would save an
// instruction, but its product is not rounded, and where |score * c| is large it differs too much
// from the reference: half an ulp of 2^30 is 64, in an exponent a factor 2^64.
__device__ __forceinline__ float exp2_of_product(float score, float c, float reference) {
    return exp2_approx(__fmul_rn(score, c) - reference);
}

// c m, which is subtracted from a row's c S. Of no key, or scores of -inf alone, the lowest float:
// there -inf + inf would be NaN, and 2^(-inf - lowest) is 0.
__device__ __forceinline__ float finite_reference(float m, float c) {
    constexpr float LOWEST = -3.4028234663852886e38f;
    return fmaxf(m * c, LOWEST);
}

// A query's lse as the exponentials want it: with -inf, P = 0; with inf, which says that a score
// is, P is NaN.
template <class Real> __device__ __forceinline__ Real effective_lse(Real lse) {
    return lse == -infinity() ? Real(infinity()) : lse + (lse - lse);
}

// P = exp(scale S - lse). The product is rounded by itself, as the forward pass rounded it: however
// large the scores, a row's winner has the weight that it had there.
__device__ __forceinline__ float weight(float score, float scale, float lse) {
    return exp2_approx((__fmul_rn(score, scale) - lse) * LOG2_E);
}
