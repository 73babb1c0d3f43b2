// Weights of tangents, P (W - r), and lse, of sm90/jvp.cu's consumers.
#pragma once
#include "common/softmax.cuh"
#include "sm90/consumer_constants.cuh"

// lse of maximum m and sum l: |scale| m + log(l), less the logarithm of the factor by which
// online_softmax made l too large. max_scaled: finite_max_scaled().
__device__ __forceinline__ float lse_of_sum(
    float m, float l, float scale, float scale_log2, float max_scaled) {
    constexpr float LN_2 = 0.6931471805599453f;
    const float log_excess = fmaf(m, scale_log2, -max_scaled) * LN_2;
    return l == 0.0f ? -infinity() : m * scale + (logf(l) - log_excess);
}

// Of the lane's two rows: r; this lane's part of sum P (W - r), relative to the maximum as l is.
struct TangentState { float reference[2] = {0.0f, 0.0f}, sum[2] = {0.0f, 0.0f}; };

// r of rows that had no key before this tile: sum P W / sum P over it. No key: r stays 0.
__device__ __forceinline__ void choose_references(
    TangentState& tangents, const bool (&had_no_key)[2], const Scores& p, const Scores& w,
    float scale) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weights = 0.0f, sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i)
            if (i / 2 % 2 == half) {
                weights += p[i];
                sum = fmaf(p[i], w[i], sum);
            }
        weights = quad_sum(weights);
        sum = quad_sum(sum);
        if (had_no_key[half] && weights > 0.0f) tangents.reference[half] = scale * sum / weights;
    }
}

// W becomes P (W - r), with W scaled.
__device__ __forceinline__ void weigh_tangents(
    TangentState& tangents, const Scores& p, Scores& w, float scale, const float (&rescale)[2]) {
    float sum[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) {
        const int half = i / 2 % 2;
        w[i] = p[i] * fmaf(w[i], scale, -tangents.reference[half]);
        sum[half] += w[i];
    }
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        tangents.sum[half] = tangents.sum[half] * rescale[half] + sum[half];
}
