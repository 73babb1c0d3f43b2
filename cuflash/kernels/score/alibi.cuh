// ALiBi (ALIBI; Press, Smith, Lewis 2022, arXiv:2108.12409): a head's slope times the distance is
// subtracted from each score.
//
//     x = x - slope |distance|,  distance = query + seqlen_k - seqlen_q - key
//
// A packed sequence counts as a batch. The tokens outside all sequences have no slopes: they see
// nothing, and take 0.
//
// Constants: ALIBI, PACKED.
#pragma once
#include "common/types.cuh"

// The batch of slopes, where `args` are those of a sequence (sequence_arguments).
template <class Arguments> inline int batch_of_slopes(const Arguments& args, int batch) {
    if constexpr (PACKED) return args.options.sequence;
    else return batch;
}

template <class Real> struct Alibi {
    Real slope;

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (ALIBI) {
            slope = 0;
            if (PACKED && batch == args.options.num_sequences) return;
            const HeadStrides stride = args.options.alibi_stride;
            slope = static_cast<const float*>(args.alibi_slopes)[
                batch * stride.batch + head * stride.head];
        }
    }
};
