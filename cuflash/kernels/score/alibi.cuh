// ALiBi (ALIBI; Press, Smith, Lewis 2022, arXiv:2108.12409): a head's slope times the distance is
// subtracted from each score.
//
//     x = x - slope |distance|,  distance = query + seqlen_k - seqlen_q - key
//
// Constants: ALIBI.
#pragma once
#include "common/types.cuh"

template <class Real> struct Alibi {
    Real slope;

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (ALIBI) {
            const HeadStrides stride = args.options.alibi_stride;
            slope = static_cast<const float*>(args.alibi_slopes)[
                batch * stride.batch + head * stride.head];
        }
    }
};
