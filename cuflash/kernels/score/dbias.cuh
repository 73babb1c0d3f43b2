// The gradient of a bias (DBIAS): dS before the slope of a softcap, summed over the axes along
// which the bias was broadcast.
//
// The sums are Accumulator<Element> in the shape that the user gave the bias. Without broadcasting
// each sum gets one pair; otherwise the order of additions is not fixed.
//
// STORES_DBIAS: a sum gets one pair, and kernels visit all pairs, masked ones too. So each is
// stored, and memory may hold anything before. Otherwise it is zeroed.
#pragma once
#include "common/constants.cuh"

// One head's sums.
struct BiasGradient {
    Accumulator<Element>* sums;
    i64 stride_q, stride_k;
    int num_queries, num_keys;                              // with STORES_DBIAS

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (DBIAS) {
            const PairStrides& stride = args.options.dbias_stride;
            sums = static_cast<Accumulator<Element>*>(args.dbias)
                 + batch * stride.batch + head * stride.head;
            stride_q = stride.query;
            stride_k = stride.key;
            if constexpr (STORES_DBIAS) {
                num_queries = arrays_of(args).shape.seqlen_q;
                num_keys = arrays_of(args).shape.seqlen_k;
            }
        }
    }
    // Masked pairs have ds = 0 and may lie past the arrays' ends.
    void add(int query, int key, Accumulator<Element> ds) const {
        if constexpr (STORES_DBIAS) {
            if (query < num_queries && key < num_keys) sums[query * stride_q + key * stride_k] = ds;
        } else {
            if (ds != 0) atomicAdd(sums + (query * stride_q + key * stride_k), ds);
        }
    }
    // Of float: whether a query's sums of four keys from a multiple of 4 on are 16 aligned bytes.
    bool has_quads() const {
        return stride_k == 1 && stride_q % 4 == 0 && reinterpret_cast<u64>(sums) % 16 == 0;
    }
    // With has_quads: the same of four keys from a multiple of 4 on, all within the array.
    void add_quad(int query, int key, const float (&ds)[4]) const {
        float* four = reinterpret_cast<float*>(sums + (query * stride_q + key));
        if constexpr (STORES_DBIAS)
            *reinterpret_cast<float4*>(four) = make_float4(ds[0], ds[1], ds[2], ds[3]);
        else
            reduce_add_4(four, ds);
    }
    // Of a masked pair, where its ds was not computed.
    void add_masked(int query, int key) const {
        if constexpr (STORES_DBIAS) add(query, key, 0);
    }
};
