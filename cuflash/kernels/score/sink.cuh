// Attention sinks (SINK): one more logit in a head's softmax, without a value. And lse, which every
// forward kernel ends with.
//
//     l' = l exp(m) + exp(sink),  O = acc exp(m) / l',  lse = log(l')
#pragma once
#include "common/constants.cuh"
#include "common/softmax.cuh"

// lse = m + log(l) of a row with maximum m and sum l. l is 0, and lse -inf, if the row has no key
// or only scores of -inf. A score past the largest number is inf, or becomes inf when exp2 takes it
// times log2(e): it makes l NaN, and lse is inf.
template <class Real> inline Real lse_of_row(Real m, Real l) {
    if (l == 0) return -Real(infinity());
    const bool overflows = l != l && m * Real(1.4426950408889634) == Real(infinity());
    return overflows ? Real(infinity()) : m + log(l);
}

// A row's state with the sink: l exp(m) + exp(sink) = sum exp(top). Whatever was summed relative to
// m must be multiplied by rescale. m and sink may be -inf.
template <class Real> struct WithSink {
    Real top, sum, rescale, weight;                         // weight: exp(sink - top)
    WithSink(Real m, Real l, Real sink) {
        const bool nothing = m == -Real(infinity()) && sink == m;
        top = sink > m ? sink : m;
        rescale = nothing ? Real(1) : exp(m - top);
        weight = nothing ? Real(0) : exp(sink - top);
        sum = nothing ? l : l * rescale + weight;
    }
};

// A head's sink; -inf without one, and for tokens outside all packed sequences, which may come with
// the head NO_HEAD.
constexpr int NO_HEAD = -1;
template <class Real, class Arguments> inline Real sink_of(const Arguments& args, int head) {
    if constexpr (SINK) {
        if (PACKED && (head == NO_HEAD || args.options.sequence == args.options.num_sequences))
            return -Real(infinity());
        return static_cast<const Real*>(args.sink)[head * args.options.sink_stride];
    } else {
        return -Real(infinity());
    }
}
