// The online softmax of forward.cu, on a warpgroup's accumulator S.
#pragma once
#include "common/upper_halves.cuh"
#include "sm90/forward_shared.cuh"

// Of the lane's two rows, which are 8 apart. cm: c m, rounded. l: this lane's share of the sum.
struct Rows { float m[2], cm[2], l[2]; };
__device__ __forceinline__ Rows no_rows() {
    return {{-infinity(), -infinity()}, {-infinity(), -infinity()}, {0.0f, 0.0f}};
}

// What m is multiplied to be subtracted: 2^(c S - reference).
__device__ __forceinline__ float reference(float m, float c) {
    return m == -infinity() ? 0.0f : m * c;                 // else 2^(-inf + inf)
}

// What makes scores of the lane's products where slopes are in those: factor, and what either row
// lacks. It is added to their maxima, and not to each.
struct Origins {
    float of[2] = {0.0f, 0.0f}, factor = 1.0f;
    __device__ __forceinline__ float score(int half, float s) const {
        return SLOPES_IN_PRODUCT ? fmaf(s, factor, of[half]) : s;
    }
    // What is subtracted from c S if it were cm from the score times c.
    __device__ __forceinline__ float subtracted(int half, float cm, float c) const {
        return SLOPES_IN_PRODUCT ? fmaf(-c, of[half], cm) : cm;
    }
    __device__ __forceinline__ float exponent(float s, float c, float subtracted) const {
        return s * (SLOPES_IN_PRODUCT ? factor * c : c) - subtracted;
    }
};

// S becomes P = 2^(c S - subtracted), and what that comes to in each row: of a tile by itself, as
// roundings of one long sum are alike where weights are, and all to one side.
template <class By>
__device__ __forceinline__ void sum_weights(
    float (&s)[S_COUNT], float (&sum)[2], float c, const float (&subtracted)[2], const By& by) {
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) {
        s[i] = exp2_approx(by.exponent(s[i], c, subtracted[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
    }
}

// m' = max(m, rowmax(S)),  P = 2^(c S - c m'),  l' = l 2^(c m - c m') + rowsum(P): S becomes P. The
// factor by which l, and acc, shrink is given back.
//
// The product c S is not rounded before c m', which is, is subtracted. That multiplies a row's P by
// 2^(c m - round(c m)), in l and acc alike; store() takes it out of lse.
//
// by: what S lacks.
template <bool MASKED>
__device__ __forceinline__ void softmax(
    float (&s)[S_COUNT], Rows& rows, float c, float (&rescale)[2], const Origins& by) {
    float subtracted[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = s[half * 2];
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j)
            m = fmaxf(fmaxf(m, s[j * 4 + half * 2]), s[j * 4 + half * 2 + 1]);
        m = fmaxf(rows.m[half], quad_max(by.score(half, m)));
        const float cm = __fmul_rn(m, c);                   // if fused, m' = m would rescale too
        subtracted[half] = MASKED && m == -infinity() ? 0.0f : cm;
        rescale[half] = exp2_approx(rows.cm[half] - subtracted[half]);
        rows.m[half] = m;
        rows.cm[half] = cm;
        subtracted[half] = by.subtracted(half, subtracted[half], c);
    }
    float sum[2] = {0.0f, 0.0f};
    sum_weights(s, sum, c, subtracted, by);
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        rows.l[half] = rows.l[half] * rescale[half] + sum[half];
}

// What makes scores of slight products, by log2(e) already: while exponentials are waited for.
struct Poly3Scores {
    const ScoreMod<float>& steps;
    __device__ __forceinline__ float subtracted(int, float cm, float) const { return cm; }
    __device__ __forceinline__ float exponent(float s, float, float subtracted) const {
        return fmaf(steps.poly3_factor_log2(s), s, -subtracted);
    }
};

// The same where m stays, so neither l nor acc shrinks: P may be above 1.
template <class By>
__device__ __forceinline__ void softmax_of_old_maxima(
    float (&s)[S_COUNT], Rows& rows, float c, const By& by) {
    float subtracted[2], sum[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int half = 0; half < 2; ++half) subtracted[half] = by.subtracted(half, rows.cm[half], c);
    sum_weights(s, sum, c, subtracted, by);
    #pragma unroll
    for (int half = 0; half < 2; ++half) rows.l[half] += sum[half];
}

// Whether m may stay, for all rows of the warp: no P is above 2^15, which float16 has, and by which
// log(l) is less exact by a few 2^-24. Not if a score is NaN or infinite, or a row saw no key yet.
// Two numbers take an instruction, a maximum of each row two.
__device__ __forceinline__ bool maxima_may_stay(
    const float (&s)[S_COUNT], const Rows& rows, float c, const Origins& by) {
    constexpr float MOST = 15.0f;
    const float top = largest_at_most(s);
    bool may_stay = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        may_stay &= by.exponent(top, c, by.subtracted(half, rows.cm[half], c)) <= MOST;
    return __ballot_sync(WHOLE_WARP, may_stay) == WHOLE_WARP;
}
