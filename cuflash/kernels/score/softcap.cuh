// Softcap (SOFTCAP, docs/guide/options.md): x = cap tanh(scale S / cap), dx / d(scale S) = 1 -
// tanh^2.
//
// Three formulas compute tanh:
//
//   any S     16-bit Element: tanh|x| = 2 r - 1, r = 1 / (1 + e^(-2|x|)); 1 - tanh^2 = 4 r (1 - r).
//             The absolute error is at most 8 * 2^-24, so a score is off by 8 * 2^-24 cap. Other
//             elements, and LARGE_SOFTCAP, use the library's tanh, whose error is relative to x.
//   poly4     tanh x = x p(x^2), p of four terms, if all S of a warp are small
//   poly3     the same with three terms, if they are smaller still
//
// The host multiplies the polynomials' terms by cap, scale and log2(e) (request/softcap.py). Their
// errors are relative to the score, too: 11 and 27 * 2^-24, and 2.7 and 4.2 * 2^-24 cap, including
// the rounding here (test_softcap.py). A warp chooses a formula by all the S that it holds, so
// forward and backward may choose differently, and the scores of a pair then differ by the errors
// of both.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "common/upper_halves.cuh"

// 1 / x of N numbers, a power of two up to 4, with a single division: the product of all N must be
// finite. If one x is NaN, all results are.
template <int N> inline void invert(float* x) {
    if constexpr (N == 1) {
        x[0] = reciprocal_approx(x[0]);
    } else {
        float inverse[N / 2];                               // of the products of neighbours
        #pragma unroll
        for (int i = 0; i < N / 2; ++i) inverse[i] = x[2 * i] * x[2 * i + 1];
        invert<N / 2>(inverse);
        #pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float first = x[2 * i];
            x[2 * i] = inverse[i] * x[2 * i + 1];
            x[2 * i + 1] = inverse[i] * first;
        }
    }
}

// Whether sums of eight squares are at most `most`, for all numbers of a warp: one multiply-add
// each, because a maximum would compete with the row maxima for their unit. The sum is stricter
// than a maximum by up to sqrt(8). A NaN never fits.
template <int N> inline bool squares_fit(const float (&numbers)[N], float most) {
    static_assert(N % 8 == 0, "each number is tested");
    bool fits = true;
    #pragma unroll
    for (int first = 0; first < N; first += 8) {
        float squares = 0.0f;
        #pragma unroll
        for (int i = first; i < first + 8; ++i) squares = fmaf(numbers[i], numbers[i], squares);
        fits &= squares <= most;
    }
    return __ballot_sync(0xFFFFFFFFu, fits) == 0xFFFFFFFFu;
}

template <class Real> struct Softcap {
    Real softcap, inverse_softcap;
    float twice_by_cap;                                     // 2 scale / softcap * log2(e)
    float poly4_terms[4], poly4_terms_log2[4], poly4_most, poly4_inverse_log2;
    float poly3_terms_log2[3], poly3_most, poly3_lowest;

    template <class Arguments> explicit Softcap(const Arguments& args) {
        if constexpr (SOFTCAP) {
            const OptionNumbers& options = args.options;
            softcap = static_cast<Real>(options.softcap);
            inverse_softcap = static_cast<Real>(1.0 / options.softcap);
            twice_by_cap = static_cast<float>(
                2.8853900817779268 * arrays_of(args).scale / options.softcap);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                poly4_terms[i] = options.poly4_terms[i];
                poly4_terms_log2[i] = options.poly4_terms_log2[i];
            }
            poly4_most = options.poly4_most;
            poly4_inverse_log2 = options.poly4_inverse_log2;
            #pragma unroll
            for (int i = 0; i < 3; ++i) poly3_terms_log2[i] = options.poly3_terms_log2[i];
            poly3_most = options.poly3_most;
            poly3_lowest = options.poly3_lowest;
        }
    }

    // Caps N elements S and returns the derivatives. GROUP consecutive elements share a division.
    template <int GROUP, int N>
    void cap(Real (&x)[N], Real (&derivative)[N], Real scale) const {
        if constexpr (sizeof(Element) == 2 && !LARGE_SOFTCAP) {
            #pragma unroll
            for (int first = 0; first < N; first += GROUP) {
                float r[GROUP];
                #pragma unroll
                for (int i = first; i < first + GROUP; ++i) {
                    x[i] *= twice_by_cap;
                    r[i - first] = exp2_approx(-fabsf(x[i])) + 1.0f;
                }
                invert<GROUP>(r);
                #pragma unroll
                for (int i = first; i < first + GROUP; ++i) {
                    const float y = r[i - first];
                    derivative[i] = fmaf(-4.0f * y, y, 4.0f * y);
                    x[i] = copysignf(fmaf(2.0f * softcap, y, -softcap), x[i]);
                }
            }
        } else {
            #pragma unroll
            for (int i = 0; i < N; ++i) {
                const Real t = tanh(rounded(rounded(x[i], scale), inverse_softcap));
                derivative[i] = fma(-t, t, Real(1));
                x[i] = rounded(t, softcap);
            }
        }
    }

    // Whether all S of a warp are in poly4's range.
    template <int N> bool fits_tanh_poly4(const float (&products)[N]) const {
        return squares_fit(products, poly4_most);
    }

    // Whether all S of a warp are in poly3's range. It is so small that no weight overflows
    // relative to an old row maximum (times log2(e)) of at least poly3_lowest, so that maximum may
    // stay. Compares upper halves, half an instruction per element; the lower half of poly3_most
    // is 0.
    template <int N> bool fits_tanh_poly3(const float (&products)[N], float lowest_maximum) const {
        const bool fits = largest_upper_half<true>(products) < __float_as_uint(poly3_most)
                       && lowest_maximum >= poly3_lowest;
        return __ballot_sync(0xFFFFFFFFu, fits) == 0xFFFFFFFFu;
    }

    // cap tanh(scale S / cap) of one S.
    float poly4_score(float product) const {
        return product * polynomial(poly4_terms, product * product);
    }
    // The factor of S that gives that score times log2(e), for a multiply-add with another term.
    float poly4_factor_log2(float product) const {
        return polynomial(poly4_terms_log2, product * product);
    }
    float poly3_factor_log2(float product) const {
        return polynomial(poly3_terms_log2, product * product);
    }
    // tanh, from the score times log2(e).
    float poly4_tanh(float score_log2) const { return score_log2 * poly4_inverse_log2; }

private:
    static float polynomial(const float (&terms)[4], float x) {
        return fmaf(fmaf(fmaf(terms[3], x, terms[2]), x, terms[1]), x, terms[0]);
    }
    static float polynomial(const float (&terms)[3], float x) {
        return fmaf(fmaf(terms[2], x, terms[1]), x, terms[0]);
    }
};
