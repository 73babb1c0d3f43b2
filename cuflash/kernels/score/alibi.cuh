// ALiBi (ALIBI; Press, Smith, Lewis 2022, arXiv:2108.12409): a head's slope times the distance is
// subtracted from each score.
//
//     x = x - slope |distance|,  distance = query + seqlen_k - seqlen_q - key
//
// A packed sequence counts as a batch. The tokens outside all sequences see nothing, and have no
// slopes to read: theirs is 0.
#pragma once
#include "common/constants.cuh"

template <class Real> struct Alibi {
    Real slope;

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (ALIBI && PACKED) {
            set_sequence(args, args.options.sequence, head);
        } else if constexpr (ALIBI) {
            const HeadStrides stride = args.options.alibi_stride;
            slope = static_cast<const Accumulator<Element>*>(args.alibi_slopes)[
                batch * stride.batch + head * stride.head];
        }
    }
    // After set_head(), in kernels whose blocks take one packed sequence after another.
    template <class Arguments> void set_sequence(const Arguments& args, int sequence, int head) {
        if constexpr (ALIBI && PACKED) {
            const HeadStrides stride = args.options.alibi_stride;
            slope = 0;
            if (sequence < args.options.num_sequences)
                slope = static_cast<const Accumulator<Element>*>(args.alibi_slopes)[
                    sequence * stride.batch + head * stride.head];
        }
    }
};
