// Merging results of the same row over disjoint sets of keys, its parts:
//
//     m = max_i lse_i,  w_i = exp(lse_i - m),  O = sum_i w_i O_i / sum_i w_i,
//     lse = m + log(sum_i w_i)
//
// A part with lse = inf makes the weights NaN and lse inf; one with lse = -inf has no visible key
// and takes no part, whatever its O is. A row with one other part is bitwise that part.
#pragma once
#include "common/softmax.cuh"

// Over each LANES consecutive lanes, in every lane. The maximum skips NaN.
template <int LANES, class Real> __device__ __forceinline__ Real max_of_lanes(Real x) {
    #pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x = fmax(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}
template <int LANES, class Real> __device__ __forceinline__ Real sum_of_lanes(Real x) {
    #pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// A row's state while a warp merges its parts: m, the sum of weights, and O in COLUMNS columns of
// each lane, relative to m. Of LANES parts, lane i has the lse of part i % LANES; the O of GROUP of
// them are loaded at once.
template <class Real, int COLUMNS, int LANES = 32, int GROUP = LANES < 8 ? LANES : 8>
struct MergedRow {
    static_assert(32 % LANES == 0 && LANES % GROUP == 0, "a group's weights are those of lanes");

    Real m = -Real(infinity()), sum = 0, out[COLUMNS];

    // -0 is the identity of +: 0 + -0 is 0.
    __device__ __forceinline__ MergedRow() {
        #pragma unroll
        for (Real& element : out) element = -Real(0);
    }

    // Adds at most LANES parts. lse, of the lane's part, is -inf if there is none; out_of(part, i)
    // is the lane's i-th column of O.
    template <class OutOf> __device__ __forceinline__ void add(int parts, Real lse, OutOf out_of) {
        const bool has_keys = lse != -Real(infinity());
        const u32 with_keys = __ballot_sync(WHOLE_WARP, has_keys);
        const Real m_new = fmax(m, max_of_lanes<LANES>(lse));
        const Real rescale = m == -Real(infinity()) ? Real(0) : exp(m - m_new);
        const Real weight = has_keys ? exp(lse - m_new) : Real(0);
        sum = sum * rescale + sum_of_lanes<LANES>(weight);
        m = m_new;
        #pragma unroll
        for (Real& element : out) element *= rescale;
        for (int first = 0; first < parts; first += GROUP) {
            Real x[GROUP][COLUMNS];
            #pragma unroll
            for (int p = 0; p < GROUP; ++p)
                #pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    x[p][i] = first + p < parts ? out_of(first + p, i) : Real(0);
            #pragma unroll
            for (int p = 0; p < GROUP; ++p) {
                const Real w = __shfl_sync(WHOLE_WARP, weight, first + p);
                const bool is_seen = with_keys >> (first + p) & 1;
                #pragma unroll
                for (int i = 0; i < COLUMNS; ++i) out[i] += is_seen ? w * x[p][i] : -Real(0);
            }
        }
    }

    // The lane's i-th column, to be divided by sum; 0 without a part that has keys.
    __device__ __forceinline__ Real column(int i) const { return sum == 0 ? Real(0) : out[i]; }
};
