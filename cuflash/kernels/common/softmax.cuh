// Softmax on mma C fragments. Of each 16-row tile lane l holds parts of rows l / 4 and l / 4 + 8.
// The four lanes of a quad share a row: its maximum and sum are reduced over them.
#pragma once
#include "common/ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7FC00000); }

// What a score is multiplied by in an exponent of 2: |scale| log2(e) if it is S itself
// (score_mod.cuh's LINEAR), else log2(e). Never 0: 0 * inf is NaN.
template <bool IS_LINEAR> __device__ __forceinline__ float exponent_scale(double scale) {
    return IS_LINEAR ? fmaxf(fabsf(static_cast<float>(scale)) * LOG2_E, 1.2e-38f) : LOG2_E;
}

// The maximum, which skips NaN, and the sum over a quad's lanes, in each of them.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// 2^(score * scale_log2 - reference) with the product rounded on its own, as the reference was: the
// row's maximum has weight 1 exactly, every other score at most 1. A fused multiply-add would save
// an instruction, but does not round its product, which for large |score * scale_log2| differs too
// much from the reference: half an ulp of 2^30 is 64, in an exponent a factor 2^64.
__device__ __forceinline__ float exp2_of_product(
    float score, float scale_log2, float reference) {
    return exp2_approx(__fmul_rn(score, scale_log2) - reference);
}

// The reference of a row: m * scale_log2, which is subtracted from its scaled scores. For a row
// without a key, or with scores of -inf only, the lowest float: -inf + inf would be NaN, and
// 2^(-inf - lowest) is 0.
__device__ __forceinline__ float finite_reference(float m, float scale_log2) {
    constexpr float LOWEST = -3.4028234663852886e38f;
    return fmaxf(m * scale_log2, LOWEST);
}

// A query's lse for P = exp(x - lse): lse = -inf becomes inf, so that P = 0; lse = inf, which means
// that a score is inf, becomes NaN, and so does P.
template <class Real> __device__ __forceinline__ Real effective_lse(Real lse) {
    return lse == -infinity() ? Real(infinity()) : lse + (lse - lse);
}

// P = exp(scale S - lse). The product is rounded on its own, as in the forward pass: however large
// the scores, a row's maximum has the weight that it had there.
__device__ __forceinline__ float weight(float score, float scale, float lse) {
    return exp2_approx((__fmul_rn(score, scale) - lse) * LOG2_E);
}

// P = exp((x - lse) - rest) of a score x of its own, to base e (lse_rest.cuh).
__device__ __forceinline__ float weight_beside(float rest, float score, float lse) {
    return exp2_approx(fmaf(score - lse, LOG2_E, -LOG2_E * rest));
}
