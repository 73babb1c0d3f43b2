// The gradient of a bias (DBIAS): dS before the slope of a softcap, summed over the axes along
// which the bias was broadcast.
//
// The sums are Accumulator<Element> in the shape that the user gave the bias, zeroed beforehand.
// Without broadcasting each sum gets one pair; otherwise the order of additions is not fixed.
#pragma once
#include "common/constants.cuh"

// One head's sums.
struct BiasGradient {
    Accumulator<Element>* sums;
    i64 stride_q, stride_k;

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (DBIAS) {
            const PairStrides& stride = args.options.dbias_stride;
            sums = static_cast<Accumulator<Element>*>(args.dbias)
                 + batch * stride.batch + head * stride.head;
            stride_q = stride.query;
            stride_k = stride.key;
        }
    }
    // Masked pairs have ds = 0 and may lie past the arrays' ends.
    void add(int query, int key, Accumulator<Element> ds) const {
        if (ds != 0) atomicAdd(sums + (query * stride_q + key * stride_k), ds);
    }
};
