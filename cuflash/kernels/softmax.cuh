// The online softmax on mma C fragments: lane l holds, of each 16-row tile, rows l / 4 and l / 4 + 8,
// and of those rows the columns that its quad's other three lanes do not hold.
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// 2^(score * c - reference) as one fused multiply-add and one exponential. Exact at score * c =
// reference only while rounding the product costs less than it weighs: see exp2_far.
__device__ __forceinline__ float exp2_near(float score, float c, float reference) {
    return exp2_approx(fmaf(score, c, -reference));
}

// The same where |reference| may be so large that one rounding of score * c is a factor 2^many: both
// products are rounded alike, so that the row's maximum has weight 1 exactly.
__device__ __forceinline__ float exp2_far(float score, float c, float reference) {
    return exp2_approx(__fmul_rn(score, c) - reference);
}

// From this |reference| on exp2_far is needed. Half an ulp of 2^20 is 2^-4: below it exp2_near is off
// by at most a common factor 2^(1/16) in a row, which the row's sum shares and the division removes.
constexpr float FAR = 1048576.0f;

// The same for the backward pass, whose reference is a given lse: there lse * log2(e) is off by half an
// ulp, 2^-12 of P at 2^12, which is under the rounding of P to 16 bits.
constexpr float FAR_LSE = 4096.0f;
