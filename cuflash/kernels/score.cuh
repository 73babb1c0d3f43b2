// From products to scores: what happens between scale * Q K^T and the softmax (docs/masks.md).
//
//     x = scale * S,  x = cap * tanh(x / cap),  x = x - slope * |past|,  x = x + bias
//
// past = query + seqlen_k - seqlen_q - key: how far the key stands before the query. Forward and
// backward pass call the same functions: a pair has the same score to the last bit in both.
//
// Constants: Element, SOFTCAP, ALIBI, BIAS, Bias (its elements), SINK, PACKED. A call without
// SOFTCAP, ALIBI and BIAS has LINEAR scores, which kernels may compute in their own way.
// infinity(), which is to be there before, is that of the family: softmax.cuh or simt.cuh.
#pragma once
#include "elements.cuh"

constexpr bool LINEAR = !SOFTCAP && !ALIBI && !BIAS;

// tanh(x). For 16-bit elements 1 - 2 / (e^(2x) + 1), absolutely right to a few times 2^-24.
template <class Real> inline Real tanh_of(Real x) {
    if constexpr (sizeof(Element) == 2)
        return 1.0f - __fdividef(2.0f, exp2_approx(x * 2.885390081777927f) + 1.0f);
    else if constexpr (sizeof(Real) == 8) return tanh(x);
    else return tanhf(x);
}

// What one head does to its scores.
template <class Real> struct Steps {
    Real scale, softcap, inverse_softcap, slope;
    const Bias* bias;
    i64 bias_stride_q, bias_stride_k;
    int last_query, last_key;

    template <class Arguments>
    explicit Steps(const Arguments& arguments)
        : scale(static_cast<Real>(arrays_of(arguments).scale)) {
        if constexpr (SOFTCAP) {
            softcap = static_cast<Real>(arguments.options.softcap);
            inverse_softcap = static_cast<Real>(1.0 / arguments.options.softcap);
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
        }
    }

    // A pair's bias; of pairs that the array does not have, which are masked, that of another.
    Real bias_of(int query, int key) const {
        if constexpr (BIAS)
            return static_cast<Real>(to_accumulator(
                bias[min(query, last_query) * bias_stride_q + min(key, last_key) * bias_stride_k]));
        else
            return 0;
    }

    // The score of a product of a query and a key. derivative: of the score by scale * product.
    Real score(Real product, Real past, Real own_bias, Real& derivative) const {
        Real x = rounded(product, scale);
        derivative = 1;
        if constexpr (SOFTCAP) {
            const Real t = tanh_of<Real>(rounded(x, inverse_softcap));
            derivative = fma(-t, t, Real(1));
            x = rounded(t, softcap);
        }
        if constexpr (ALIBI) x = fma(-slope, fabs(past), x);
        if constexpr (BIAS) x += own_bias;
        return x;
    }
    Real score(Real product, Real past, Real own_bias) const {
        Real derivative;
        return score(product, past, own_bias, derivative);
    }
};

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
