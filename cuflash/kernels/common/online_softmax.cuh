// The step of the online softmax for one row and a tile of its scores x (Milakov & Gimelshein 2018,
// arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, Alg. 1, lines 9 and 10):
//
//     m' = max(m, x),  P = exp(x - m'),  l' = l exp(m - m') + rowsum(P)
//
// and acc, and whatever else is relative to m, times exp(m - m'). m is the row's maximum, known to
// all its lanes; l is this lane's part of the sum. An Exp computes exp(x - m) of x and the row's
// reference, which is m but where all scores so far are -inf. sm90/forward_softmax.cuh, which fuses
// products with subtractions, has a step of its own.
#pragma once
#include "common/softmax.cuh"

// 2^(scale_log2 (x - m)), the product rounded on its own.
struct ScaledExp2 {
    static constexpr bool IS_SLOW = false;
    float scale_log2;
    __device__ __forceinline__ float reference(float m) const {
        return finite_reference(m, scale_log2);
    }
    __device__ __forceinline__ float operator()(float x, float reference) const {
        return exp2_of_product(x, scale_log2, reference);
    }
};

// exp(x - m). m = -inf: exp(-inf - 0) = 0.
template <class Real> struct NaturalExp {
    static constexpr bool IS_SLOW = false;
    __device__ __forceinline__ Real reference(Real m) const {
        return m == -Real(infinity()) ? Real(0) : m;
    }
    __device__ __forceinline__ Real operator()(Real x, Real reference) const {
        return exp(x - reference);
    }
};

// m becomes m'. Returns its reference. rescale(factor): multiplies what, besides l, is relative to
// m. An Exp that IS_SLOW is not computed where m stays.
template <class Exp, class Real, class Rescale>
__device__ __forceinline__ Real raise_max(
    Exp exp, Real& m, Real& l, Real new_m, Rescale rescale) {
    const Real reference = exp.reference(new_m);
    if (!Exp::IS_SLOW || new_m != m) {
        const Real factor = exp(m, reference);
        l *= factor;
        rescale(factor);
    }
    m = new_m;
    return reference;
}

// The scores x(0) .. x(COUNT - 1), of one row or, as in C fragments, by pairs of two rows in turn,
// become P and are added to l. Each tile is summed before it is added: in one long sum of similar
// weights, all additions may round in the same direction.
template <int COUNT, int ROWS, class Exp, class Real, class Scores>
__device__ __forceinline__ void weigh(
    Exp exp, const Real (&reference)[ROWS], Real (&l)[ROWS], Scores x) {
    Real sum[ROWS] = {};
    #pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        x(n) = exp(x(n), reference[n / 2 % ROWS]);
        sum[n / 2 % ROWS] += x(n);
    }
    #pragma unroll
    for (int row = 0; row < ROWS; ++row) l[row] += sum[row];
}

// The maximum of one of the lane's two rows of a warpgroup's accumulator, half 0 or 1.
template <int COUNT>
__device__ __forceinline__ float row_max(const float (&s)[COUNT], int half) {
    float most = s[half * 2];
    #pragma unroll
    for (int i = 0; i < COUNT / 4; ++i)
        most = fmaxf(fmaxf(most, s[i * 4 + half * 2]), s[i * 4 + half * 2 + 1]);
    return quad_max(most);
}

// A lane's row of D C fragments: the upper one, or, of half 1, the lower.
template <class Real, int D>
__device__ __forceinline__ void rescale_row(Real (&acc)[D][4], int half, Real factor) {
    #pragma unroll
    for (int j = 0; j < D; ++j) {
        acc[j][half * 2] *= factor;
        acc[j][half * 2 + 1] *= factor;
    }
}
