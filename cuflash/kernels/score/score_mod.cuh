// Score modifications: what happens to S = Q K^T before the softmax (docs/guide/options.md).
//
//     x = scale S,  x = cap tanh(x / cap),  x = x + (bias - slope |distance|)
//
// distance = query + seqlen_k - seqlen_q - key: by how many tokens the key precedes the query.
// Forward and backward call the same functions, so a pair has bitwise the same score in both.
// Exceptions: the division that scores() shares among neighbours, the softcap's polynomials
// (softcap.cuh), and ALiBi on tensor cores in sm90/forward.cu (alibi_mma.cuh).
//
// A call without SOFTCAP, ALIBI and BIAS has LINEAR scores, scale S, which kernels may compute in
// other ways.
#pragma once
#include "score/alibi.cuh"
#include "score/bias.cuh"
#include "score/sink.cuh"
#include "score/softcap.cuh"

constexpr bool LINEAR = !SOFTCAP && !ALIBI && !BIAS;

template <class Real> struct SoftmaxScale { Real scale; };

// One head's score modifications.
template <class Real>
struct ScoreMod : SoftmaxScale<Real>, Softcap<Real>, Alibi<Real>, HeadBias<Real> {
    using SoftmaxScale<Real>::scale;

    template <class Arguments>
    explicit ScoreMod(const Arguments& args)
        : SoftmaxScale<Real>{static_cast<Real>(arrays_of(args).scale)}, Softcap<Real>(args) {}

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        Alibi<Real>::set_head(args, batch, head);
        HeadBias<Real>::set_head(args, batch, head);
    }

    // bias - slope |distance|
    Real addend(Real distance, Real bias) const {
        if constexpr (ALIBI && BIAS) return fma(-this->slope, fabs(distance), bias);
        else if constexpr (ALIBI) return rounded(-this->slope, fabs(distance));
        else return bias;
    }

    // The score modification: N products S become scores x. Any other modification belongs here,
    // and its derivative with it.
    //
    // additive(i): the addend of the i-th. derivative: dx / d(scale S). With a softcap,
    // GROUP neighbours share one division: if one S is NaN, all scores of its group are.
    template <int GROUP, int N, class Additive>
    void scores(Real (&x)[N], Additive additive, Real (&derivative)[N]) const {
        if constexpr (SOFTCAP) this->template cap<GROUP>(x, derivative, scale);
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (!SOFTCAP) derivative[i] = 1;
            if constexpr (LINEAR) x[i] = rounded(x[i], scale);
            else if constexpr (!SOFTCAP) x[i] = fma(x[i], scale, additive(i));
            else if constexpr (ALIBI || BIAS) x[i] += additive(i);
        }
    }

    // The same for a warp's products that fits_tanh_poly4() accepts.
    template <int N, class Additive>
    void poly4_scores(float (&x)[N], Additive additive, float (&derivative)[N]) const {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            const float capped = this->poly4_score(x[i]), t = capped * this->inverse_softcap;
            derivative[i] = fmaf(-t, t, 1.0f);
            x[i] = capped + additive(i);
        }
    }

    // The same for one product.
    Real score(Real product, Real distance, Real bias, Real& derivative) const {
        Real x[1] = {product}, slope_of_x[1];
        scores<1>(x, [&](int) { return addend(distance, bias); }, slope_of_x);
        derivative = slope_of_x[0];
        return x[0];
    }
    // g' = d^2 x / d(scale S)^2 = -2 g tanh(scale S / cap) / cap of one product.
    Real curvature(Real product) const {
        if constexpr (SOFTCAP) {
            Real capped[1] = {product}, slope[1];
            this->template cap<1>(capped, slope, scale);
            const Real tanh_by_cap = capped[0] * this->inverse_softcap * this->inverse_softcap;
            return -2 * tanh_by_cap * slope[0];
        } else {
            return 0;
        }
    }

    Real score(Real product, Real distance, Real bias) const {
        Real derivative;
        return score(product, distance, bias, derivative);
    }
};
