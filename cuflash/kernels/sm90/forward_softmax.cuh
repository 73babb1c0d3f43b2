// Online softmax of forward.cu and jvp.cu, on a consumer warpgroup's accumulator S.
//
//     m' = max(m, rowmax(S)),  P = 2^(c S - c m'),  l' = l 2^(c m - c m') + rowsum(P)
//
// c = scale log2(e) (scale_log2), or log2(e) where score modifications have applied the scale.
#pragma once
#include "common/softmax.cuh"
#include "common/upper_halves.cuh"
#include "score/score_mod.cuh"
#include "sm90/consumer_constants.cuh"

// State of the lane's two rows, which are 8 apart. max_scaled: c m, rounded. sum: this lane's part
// of l, which the epilogue adds up over the quad. With MAX_SCORE, max is the largest score so far,
// where the warp kept its old m too: of the lane's own keys since then, and all keys before.
struct RowState { float max[2], max_scaled[2], sum[2]; };
__device__ __forceinline__ RowState empty_rows() {
    return {{-infinity(), -infinity()}, {-infinity(), -infinity()}, {0.0f, 0.0f}};
}

// The c m to subtract: 0 for rows that have seen no key, because 2^(-inf - -inf) would be NaN.
__device__ __forceinline__ float finite_max_scaled(float max, float scale_log2) {
    return max == -infinity() ? 0.0f : max * scale_log2;
}

// ---- Score types: how an element s of the accumulator gives a score ----
//
// value: the score of s. exponent: c score - c m, computed from s and `subtrahend`, which is c m
// less the terms that all scores of a row share.

// s is the score, or S with the scale in c.
struct PlainScore {
    __device__ __forceinline__ void set(int, float, float) {}
    __device__ __forceinline__ float value(int, float s) const { return s; }
    __device__ __forceinline__ float subtrahend(int, float max_scaled, float) const {
        return max_scaled;
    }
    __device__ __forceinline__ float exponent(float s, float scale_log2, float subtrahend) const {
        return s * scale_log2 - subtrahend;
    }
};

// ALIBI_MMA, or of an affine score (is_affine): score = factor s + the row's offset. The offset is
// applied to the row's maximum, not to each element.
struct OffsetScore {
    float offset[2] = {0.0f, 0.0f}, factor = 1.0f;
    __device__ __forceinline__ void set(int half, float row_offset, float row_factor) {
        offset[half] = row_offset;
        factor = row_factor;
    }
    __device__ __forceinline__ float value(int half, float s) const {
        return fmaf(s, factor, offset[half]);
    }
    __device__ __forceinline__ float subtrahend(
        int half, float max_scaled, float scale_log2) const {
        return fmaf(-scale_log2, offset[half], max_scaled);
    }
    __device__ __forceinline__ float exponent(float s, float scale_log2, float subtrahend) const {
        return s * (factor * scale_log2) - subtrahend;
    }
};

// s is S, and the softcap is the tanh_poly3 polynomial (softcap.cuh), with log2(e) folded in.
// Evaluated here, it fills issue slots between exponentials.
struct Poly3Score {
    const ScoreMod<float>& score_mod;
    __device__ __forceinline__ float subtrahend(int, float max_scaled, float) const {
        return max_scaled;
    }
    __device__ __forceinline__ float exponent(float s, float, float subtrahend) const {
        return fmaf(score_mod.poly3_factor_log2(s), s, -subtrahend);
    }
};

// ---- The softmax ----

// S becomes P = 2^(c S - subtrahend); adds it to `sum`. Each tile is summed before it is added to
// l: in one long sum of similar weights, all additions may round in the same direction.
template <class Score>
__device__ __forceinline__ void exp2_and_sum(
    float (&s)[S_COUNT], float (&sum)[2], float scale_log2, const float (&subtrahend)[2],
    const Score& score) {
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) {
        s[i] = exp2_approx(score.exponent(s[i], scale_log2, subtrahend[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
    }
}

// One step: S becomes P. `rescale` is the factor 2^(c m - c m') of l, by which the caller
// multiplies acc.
//
// c S - c m' is one FMA: c S is not rounded, c m' is. That multiplies all P of a row by
// 2^(c m' - round(c m')), in l and acc alike, so O is unaffected; normalise() removes it from lse.
template <bool IS_MASKED, class Score = PlainScore>
__device__ __forceinline__ void online_softmax(
    float (&s)[S_COUNT], RowState& rows, float scale_log2, float (&rescale)[2],
    const Score& score = {}) {
    float subtrahend[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = s[half * 2];
        #pragma unroll
        for (int j = 0; j < S_COUNT / 4; ++j)
            m = fmaxf(fmaxf(m, s[j * 4 + half * 2]), s[j * 4 + half * 2 + 1]);
        if constexpr (MAX_SCORE) m = quad_max(fmaxf(rows.max[half], score.value(half, m)));
        else m = fmaxf(rows.max[half], quad_max(score.value(half, m)));
        const float max_scaled = __fmul_rn(m, scale_log2);  // not fused: m' = m gives rescale 1
        subtrahend[half] = IS_MASKED && m == -infinity() ? 0.0f : max_scaled;
        rescale[half] = exp2_approx(rows.max_scaled[half] - subtrahend[half]);
        rows.max[half] = m;
        rows.max_scaled[half] = max_scaled;
        subtrahend[half] = score.subtrahend(half, subtrahend[half], scale_log2);
    }
    float sum[2] = {0.0f, 0.0f};
    exp2_and_sum(s, sum, scale_log2, subtrahend, score);
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        rows.sum[half] = rows.sum[half] * rescale[half] + sum[half];
}

// The same with the old maximum: l and acc are not rescaled, and P may exceed 1.
template <class Score>
__device__ __forceinline__ void softmax_with_old_max(
    float (&s)[S_COUNT], RowState& rows, float scale_log2, const Score& score) {
    float subtrahend[2], sum[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        subtrahend[half] = score.subtrahend(half, rows.max_scaled[half], scale_log2);
    exp2_and_sum(s, sum, scale_log2, subtrahend, score);
    #pragma unroll
    for (int half = 0; half < 2; ++half) rows.sum[half] += sum[half];
}

// The largest of the lane's elements of one of its rows, or 0 if that is larger. As integers,
// positive floats are in the same order, negative ones below; sm_90 takes the largest of three
// integers in one instruction, of floats only of two.
__device__ __forceinline__ float largest_or_zero(const float (&s)[S_COUNT], int half) {
    constexpr int CHAINS = 2;                               // independent, to hide latency
    int largest[CHAINS] = {0, 0};
    #pragma unroll
    for (int j = 0; j < S_COUNT / 4; ++j) {
        int& chain_max = largest[j % CHAINS];
        chain_max = max(max(chain_max, __float_as_int(s[j * 4 + half * 2])),
                        __float_as_int(s[j * 4 + half * 2 + 1]));
    }
    return __int_as_float(max(largest[0], largest[1]));
}

// Whether all rows of the warp may keep their maximum: no P exceeds 2^15, which float16 can hold
// and which costs log(l) a few times 2^-24 of accuracy. False if a score is NaN or infinite, or a
// row has seen no key yet. Cheaper than the rows' maxima: largest_at_most() takes half an
// instruction per element.
//
// With MAX_SCORE from the maxima themselves, which raise rows.max, and with scores of visible pairs
// alone. False, too, if all S are negative and might still exceed rows.max.
template <class Score>
__device__ __forceinline__ bool may_keep_max(
    const float (&s)[S_COUNT], RowState& rows, float scale_log2, const Score& score) {
    constexpr float MAX_EXPONENT = 15.0f;
    const float of_both = MAX_SCORE ? 0.0f : largest_at_most(s);
    bool may_keep = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = MAX_SCORE ? largest_or_zero(s, half) : of_both;
        may_keep &= score.exponent(
            top, scale_log2, score.subtrahend(half, rows.max_scaled[half], scale_log2))
            <= MAX_EXPONENT;
        if constexpr (MAX_SCORE) {
            const float value = score.value(half, top);
            may_keep &= top > 0.0f || value <= rows.max[half];
            if (top > 0.0f) rows.max[half] = fmaxf(rows.max[half], value);
        }
    }
    return __ballot_sync(WHOLE_WARP, may_keep) == WHOLE_WARP;
}
