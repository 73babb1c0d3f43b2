// The queries, keys and heads that weights and its gradients are of.
#pragma once
#include "common/packed_sequences.cuh"

constexpr int OUT_OF_RANGE = -1;

// The token that the r-th of `indices`, which may count from `end`, names; all if it is null.
inline int chosen(const void* indices, i64 stride, int r, int end) {
    if (indices == nullptr) return r;
    const int index = static_cast<const int*>(indices)[r * stride];
    const int token = index < 0 ? index + end : index;
    return token < 0 || token >= end ? OUT_OF_RANGE : token;
}

// The r-th chosen one, a token of the call, or OUT_OF_RANGE.
template <class Arguments> inline int chosen_query(const Arguments& args, int batch, int r) {
    const auto& arrays = arrays_of(args);
    const TokenStrides& stride = arrays.queries_stride;
    const int* queries = static_cast<const int*>(arrays.queries);
    if (queries != nullptr) queries += batch * stride.batch;
    return chosen(queries, stride.token, r, rows_of_head(args));
}
template <class Arguments> inline int chosen_key(const Arguments& args, int c) {
    return chosen(arrays_of(args).keys, arrays_of(args).keys_stride, c, keys_of_head(args));
}
template <class Arguments> inline int chosen_head(const Arguments& args, int n) {
    const auto& arrays = arrays_of(args);
    return chosen(arrays.heads, arrays.heads_stride, n, arrays.shape.num_heads_q);
}
