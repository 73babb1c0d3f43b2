// Merging the parts of a row that several blocks computed:
//
//     m = max_i lse_i,  w_i = exp(lse_i - m),  O = sum_i w_i O_i / sum_i w_i,
//     lse = m + log(sum_i w_i)
//
// A part with lse = inf makes the weights NaN and lse inf; one with lse = -inf has no visible key
// and takes no part.
#pragma once
#include "common/softmax.cuh"

template <class Real> __device__ __forceinline__ Real warp_max(Real x) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const Real other = __shfl_xor_sync(WHOLE_WARP, x, distance);
        x = other > x ? other : x;
    }
    return x;
}
template <class Real> __device__ __forceinline__ Real warp_sum(Real x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// A row's state while a warp merges its parts: m, the sum of weights, and O in COLUMNS columns of
// each lane, relative to m.
template <class Real, int COLUMNS> struct MergedRow {
    static constexpr int GROUP = 8;                         // of parts, loaded at once
    Real m = -Real(infinity()), sum = 0, out[COLUMNS] = {};

    // Adds the parts of as many lanes as there are. lse, of the lane's part, is -inf if there is
    // none; out_of(part, i) is the lane's i-th column of O.
    template <class OutOf> __device__ __forceinline__ void add(int parts, Real lse, OutOf out_of) {
        const Real highest = warp_max(lse), m_new = highest > m ? highest : m;
        const Real rescale = m == -Real(infinity()) ? Real(0) : exp(m - m_new);
        const Real weight = lse == -Real(infinity()) ? Real(0) : exp(lse - m_new);
        sum = sum * rescale + warp_sum(weight);
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
                #pragma unroll
                for (int i = 0; i < COLUMNS; ++i) out[i] += w == 0 ? Real(0) : w * x[p][i];
            }
        }
    }
};
