// Bias (BIAS): an array is added to the scores, x = x + bias[batch, head, query, key]. Axes along
// which it is broadcast have stride 0. dbias.cuh has its gradient.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"

// 16-bit biases of eight keys.
struct alignas(16) BiasChunk { u32 words[4]; };

// float biases of two keys.
struct alignas(8) BiasPair { float at[2]; };

// The biases of one head. Pairs past the arrays' ends are masked; they read the last row's or
// column's bias instead.
template <class Real> struct HeadBias {
    const Bias* bias;
    i64 bias_stride_q, bias_stride_k;
    int last_query, last_key;
    bool has_chunks;                    // whether eight 16-bit biases are an aligned BiasChunk
    bool has_pairs;                     // whether two floats are an aligned BiasPair

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (BIAS) {
            const PairStrides& stride = args.options.bias_stride;
            const Shape& shape = arrays_of(args).shape;
            bias = static_cast<const Bias*>(args.bias)
                 + batch * stride.batch + head * stride.head;
            bias_stride_q = stride.query;
            bias_stride_k = stride.key;
            last_query = shape.seqlen_q - 1;
            last_key = shape.seqlen_k - 1;
            has_chunks = sizeof(Bias) == 2 && bias_stride_k == 1 && bias_stride_q % 8 == 0
                      && reinterpret_cast<u64>(bias) % sizeof(BiasChunk) == 0;
            has_pairs = sizeof(Bias) == 4 && bias_stride_k == 1 && bias_stride_q % 2 == 0
                     && reinterpret_cast<u64>(bias) % sizeof(BiasPair) == 0;
        }
    }

    i64 bias_index(int query, int key) const {
        return min(query, last_query) * bias_stride_q + min(key, last_key) * bias_stride_k;
    }
    Real bias_of(int query, int key) const {
        if constexpr (BIAS)
            return static_cast<Real>(to_accumulator(bias[bias_index(query, key)]));
        else
            return 0;
    }
    // Whether each query's biases of four keys from a multiple of 4 on are 16 aligned bytes.
    bool has_quads() const {
        return bias_stride_k == 1 && bias_stride_q % 4 == 0
            && reinterpret_cast<u64>(bias) % 16 == 0;
    }
    // Whether keys up to this one are within the array, and neighbours in memory.
    bool has_row(int key) const { return bias_stride_k == 1 && key <= last_key; }
    // With has_row: the biases of a query, from `key` on.
    const Bias* row_of_bias(int query, int key) const {
        return bias + (min(query, last_query) * bias_stride_q + key);
    }
    // The biases of N keys, STEP apart from `key` on: loads that nothing separates.
    template <int STEP, int N> void load_biases(Real (&biases)[N], int query, int key) const {
        if (has_row(key + (N - 1) * STEP)) {
            const Bias* row = row_of_bias(query, key);
            #pragma unroll
            for (int i = 0; i < N; ++i)
                biases[i] = static_cast<Real>(to_accumulator(row[i * STEP]));
        } else {
            #pragma unroll
            for (int i = 0; i < N; ++i) biases[i] = bias_of(query, key + i * STEP);
        }
    }
    // With has_pairs: the biases of keys key and key + 1, both within the array, and those after.
    const BiasPair* pairs_of_bias(int query, int key) const {
        return reinterpret_cast<const BiasPair*>(
            bias + (min(query, last_query) * bias_stride_q + key));
    }
    // With has_chunks: the biases of keys key .. key + 7, all within the array, and the chunks
    // after them.
    const BiasChunk* chunks_of_bias(int query, int key) const {
        return reinterpret_cast<const BiasChunk*>(
            bias + (min(query, last_query) * bias_stride_q + key));
    }
};
