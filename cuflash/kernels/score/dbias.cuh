// The gradient of a bias: dS before the slope of a softcap, summed over the axes along which the
// bias was broadcast. Sums are kept in the shape that the user gave the bias, as
// Accumulator<Element>, and were zeroed before. Where nothing was broadcast each gets one pair;
// else the order of additions is not fixed.
//
// Constants: Element, DBIAS.
#pragma once
#include "common/types.cuh"

// One head's.
struct BiasGradient {
    Accumulator<Element>* sums;
    i64 stride_q, stride_k;

    template <class Arguments> void set_head(const Arguments& arguments, int batch, int head) {
        if constexpr (DBIAS) {
            const PairStrides& stride = arguments.options.dbias_stride;
            sums = static_cast<Accumulator<Element>*>(arguments.dbias)
                 + batch * stride.batch + head * stride.head;
            stride_q = stride.query;
            stride_k = stride.key;
        }
    }
    // Of a pair that is seen; others have 0, and may be past the arrays' ends.
    void add(int query, int key, Accumulator<Element> ds) const {
        if (ds != 0) atomicAdd(sums + (query * stride_q + key * stride_k), ds);
    }
};
