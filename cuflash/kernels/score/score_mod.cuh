// From products to scores: what happens between scale * Q K^T and the softmax
// (docs/guide/options.md).
//
//     x = scale * S,  x = cap * tanh(x / cap),  x = x + (bias - slope * |past|)
//
// past = query + seqlen_k - seqlen_q - key: how far the key stands before the query. Forward and
// backward pass call the same functions: a pair has the same score to the last bit in both, except
// for what scores() shares among neighbours, small products, and sm90/forward.cu's slopes, where
// it may round.
//
// Constants: Element, SOFTCAP, ALIBI, BIAS, Bias (its elements), SINK, PACKED. A call without
// SOFTCAP, ALIBI and BIAS has LINEAR scores, which kernels may compute in their own way.
// infinity(), which is to be there before, is that of the family: softmax.cuh or simt.cuh.
#pragma once
#include "common/elements.cuh"
#include "common/upper_halves.cuh"

constexpr bool LINEAR = !SOFTCAP && !ALIBI && !BIAS;

// 1 / x of N numbers, one to four, whose product is a number too: one division for all.
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

// 16-bit biases of eight keys.
struct alignas(16) BiasChunk { u32 words[4]; };

// What one head does to its scores.
template <class Real> struct ScoreMod {
    Real scale, softcap, inverse_softcap, slope;
    float twice_by_cap;                                     // 2 scale / softcap, for powers of two
    float terms[4], terms_log2[4], small, inverse_log2;     // of small products
    float slight_terms_log2[3], slight, lowest;             // of slight ones
    const Bias* bias;
    i64 bias_stride_q, bias_stride_k;
    int last_query, last_key;
    bool has_chunks;                                        // of 16-bit biases, in memory

    template <class Arguments>
    explicit ScoreMod(const Arguments& arguments)
        : scale(static_cast<Real>(arrays_of(arguments).scale)) {
        if constexpr (SOFTCAP) {
            softcap = static_cast<Real>(arguments.options.softcap);
            inverse_softcap = static_cast<Real>(1.0 / arguments.options.softcap);
            twice_by_cap = static_cast<float>(
                2.8853900817779268 * arrays_of(arguments).scale / arguments.options.softcap);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                terms[i] = arguments.options.cap_terms[i];
                terms_log2[i] = arguments.options.cap_terms_log2[i];
            }
            small = arguments.options.cap_small;
            inverse_log2 = arguments.options.cap_inverse_log2;
            #pragma unroll
            for (int i = 0; i < 3; ++i)
                slight_terms_log2[i] = arguments.options.cap_slight_terms_log2[i];
            slight = arguments.options.cap_slight;
            lowest = arguments.options.cap_lowest;
        }
    }

    template <class Arguments>
    void set_head(const Arguments& arguments, int batch, int head) {
        if constexpr (ALIBI) {
            const HeadStrides stride = arguments.options.alibi_stride;
            slope = static_cast<const float*>(arguments.alibi_slopes)[
                batch * stride.batch + head * stride.head];
        }
        if constexpr (BIAS) {
            const PairStrides& stride = arguments.options.bias_stride;
            const Shape& shape = arrays_of(arguments).shape;
            bias = static_cast<const Bias*>(arguments.bias)
                 + batch * stride.batch + head * stride.head;
            bias_stride_q = stride.query;
            bias_stride_k = stride.key;
            last_query = shape.seqlen_q - 1;
            last_key = shape.seqlen_k - 1;
            has_chunks = sizeof(Bias) == 2 && bias_stride_k == 1 && bias_stride_q % 8 == 0
                      && reinterpret_cast<u64>(bias) % sizeof(BiasChunk) == 0;
        }
    }

    // Where a pair's bias is; of pairs that the array does not have, which are masked, another's.
    i64 place_of_bias(int query, int key) const {
        return min(query, last_query) * bias_stride_q + min(key, last_key) * bias_stride_k;
    }
    Real bias_of(int query, int key) const {
        if constexpr (BIAS)
            return static_cast<Real>(to_accumulator(bias[place_of_bias(query, key)]));
        else
            return 0;
    }

    // With has_chunks: those of eight keys, which the array has, and of the next.
    const BiasChunk* chunks_of_bias(int query, int key) const {
        return reinterpret_cast<const BiasChunk*>(
            bias + (min(query, last_query) * bias_stride_q + key));
    }

    // What is added to a score, besides a bias -slope |past|.
    Real added(Real past, Real own_bias) const {
        if constexpr (ALIBI && BIAS) return fma(-slope, fabs(past), own_bias);
        else if constexpr (ALIBI) return rounded(-slope, fabs(past));
        else return own_bias;
    }

    // N products of queries and keys become scores. added(i): what is, to the i-th. derivative: of
    // the score by scale * product.
    //
    // For 16-bit elements tanh(|x|) = 2 r - 1, r = 1 / (1 + e^(-2|x|)), absolutely right to a few
    // times 2^-24; 1 - tanh^2 = 4 r (1 - r). One division serves TOGETHER of them, next to one
    // another: if one is NaN, all are.
    template <int TOGETHER, int N, class Added>
    void scores(Real (&x)[N], Added added, Real (&derivative)[N]) const {
        if constexpr (SOFTCAP) cap<TOGETHER>(x, derivative);
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (!SOFTCAP) derivative[i] = 1;
            if constexpr (LINEAR) x[i] = rounded(x[i], scale);
            else if constexpr (!SOFTCAP) x[i] = fma(x[i], scale, added(i));
            else if constexpr (ALIBI || BIAS) x[i] += added(i);
        }
    }
    Real score(Real product, Real past, Real own_bias, Real& derivative) const {
        Real x[1] = {product}, of_x[1];
        scores<1>(x, [&](int) { return added(past, own_bias); }, of_x);
        derivative = of_x[0];
        return x[0];
    }
    Real score(Real product, Real past, Real own_bias) const {
        Real derivative;
        return score(product, past, own_bias, derivative);
    }

    // Where all products of a warp are small, tanh(x) = x p(x^2) is a polynomial, whose terms the
    // host has multiplied by what else there is (cuflash/softcap.py): right to 2.3 * 2^-24, with
    // what is rounded here (unit/test_softcap.py). Which way is taken hangs on what a warp has at
    // once, so the scores of a pair may differ between passes by the errors of both.
    //
    // Whether they are: by sums of eight squares, a multiply-add each, where a maximum would share
    // the unit of the maxima. That asks for more than it must, by sqrt(8) at most. No NaN is small.
    template <int N> bool fits_tanh_poly4(const float (&products)[N]) const {
        static_assert(N % 8 == 0, "each is looked at");
        bool are_small = true;
        #pragma unroll
        for (int first = 0; first < N; first += 8) {
            float squares = 0.0f;
            #pragma unroll
            for (int i = first; i < first + 8; ++i)
                squares = fmaf(products[i], products[i], squares);
            are_small &= squares <= small;
        }
        return __ballot_sync(0xFFFFFFFFu, are_small) == 0xFFFFFFFFu;
    }

    // Slight ones are smaller still. A term less serves, and no power of two overflows relative to
    // a maximum of `lowest` or more, by log2(e), that their row had before: it may stay as it is.
    // Whether they are: by the upper halves of all, of which `slight` has no other. That takes half
    // an instruction each, and none is free for maxima where these are wanted anyway.
    template <int N> bool fits_tanh_poly3(const float (&products)[N], float lowest_maximum) const {
        const bool are_slight = largest_upper_half<true>(products) < __float_as_uint(slight)
                             && lowest_maximum >= lowest;
        return __ballot_sync(0xFFFFFFFFu, are_slight) == 0xFFFFFFFFu;
    }

    // cap * tanh(scale S / cap) of a small product S; the same by log2(e) as a factor of S, to be
    // multiplied where something is added; tanh of that score by log2(e).
    float poly4_score(float product) const {
        return product * polynomial(terms, product * product);
    }
    float poly4_factor_log2(float product) const {
        return polynomial(terms_log2, product * product);
    }
    float poly3_factor_log2(float product) const {
        return polynomial(slight_terms_log2, product * product);
    }
    float poly4_tanh(float score_log2) const { return score_log2 * inverse_log2; }

    // scores() of small products.
    template <int N, class Added>
    void poly4_scores(float (&x)[N], Added added, float (&derivative)[N]) const {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            const float capped = poly4_score(x[i]), t = capped * inverse_softcap;
            derivative[i] = fmaf(-t, t, 1.0f);
            x[i] = capped + added(i);
        }
    }

private:
    static float polynomial(const float (&of)[4], float x) {
        return fmaf(fmaf(fmaf(of[3], x, of[2]), x, of[1]), x, of[0]);
    }
    static float polynomial(const float (&of)[3], float x) {
        return fmaf(fmaf(of[2], x, of[1]), x, of[0]);
    }

    template <int TOGETHER, int N> void cap(Real (&x)[N], Real (&derivative)[N]) const {
        if constexpr (sizeof(Element) == 2) {
            #pragma unroll
            for (int first = 0; first < N; first += TOGETHER) {
                float r[TOGETHER];
                #pragma unroll
                for (int i = first; i < first + TOGETHER; ++i) {
                    x[i] *= twice_by_cap;
                    r[i - first] = exp2_approx(-fabsf(x[i])) + 1.0f;
                }
                invert<TOGETHER>(r);
                #pragma unroll
                for (int i = first; i < first + TOGETHER; ++i) {
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
};

// lse = m + log(l) of a row of maximum m and sum l: -inf where l is 0, as there is no key, or no
// score but -inf. A score past the largest number is inf, or becomes so where exp2 takes it times
// log2(e): it makes l NaN, and lse is inf.
template <class Real> inline Real lse_of_row(Real m, Real l) {
    if (l == 0) return -Real(infinity());
    const bool overflows = l != l && m * Real(1.4426950408889634) == Real(infinity());
    return overflows ? Real(infinity()) : m + log(l);
}

// A row's sum with the sink's weight in it: l exp(m) + exp(sink) = sum exp(top). What was summed
// with m is to be multiplied by rescale. m and sink may be -inf.
template <class Real> struct WithSink {
    Real top, sum, rescale;
    WithSink(Real m, Real l, Real sink) {
        const bool nothing = m == -Real(infinity()) && sink == m;
        top = sink > m ? sink : m;
        rescale = nothing ? Real(1) : exp(m - top);
        sum = nothing ? l : l * rescale + exp(sink - top);
    }
};

// A head's sink, -inf without one and for what is of no sequence, which may come as of no head.
constexpr int NO_HEAD = -1;
template <class Real, class Arguments>
inline Real sink_of(const Arguments& arguments, int head) {
    if constexpr (SINK) {
        if (PACKED && (head == NO_HEAD
                       || arguments.options.sequence == arguments.options.num_sequences))
            return -Real(infinity());
        return static_cast<const Real*>(arguments.sink)[head * arguments.options.sink_stride];
    } else {
        return -Real(infinity());
    }
}
