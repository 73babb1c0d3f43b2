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

// 2^(score * c - reference) with the product rounded by itself, as the reference was. A fused
// multiply-add would save an instruction, but where |score * c| is large its unrounded product differs
// from the reference by more than the exponent can bear: half an ulp of 2^30 is a factor 2^64. So the
// row's maximum has weight 1 exactly, and every other at most 1.
__device__ __forceinline__ float exp2_of_product(float score, float c, float reference) {
    return exp2_approx(__fmul_rn(score, c) - reference);
}
