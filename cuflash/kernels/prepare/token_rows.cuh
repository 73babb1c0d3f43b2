// Rows of arrays (batch, seqlen_q, num_heads_q, columns), counted as in a contiguous array. Part of
// the kernels that compute delta.
#pragma once
#include "common/types.cuh"

struct TokenRow { i64 batch, query, head; };

template <class Int> inline TokenRow split_row(Int row, Int num_heads, Int seqlen) {
    const Int token = row / num_heads;
    return {i64(token / seqlen), i64(token % seqlen), i64(row % num_heads)};
}

// The row's indices. Past the last row, batch is shape.batch or more.
inline TokenRow token_row(i64 row, const Shape& shape) {
    // 64-bit divisions take several times as long.
    if (row >> 32 == 0)
        return split_row<u32>(row, shape.num_heads_q, shape.seqlen_q);
    return split_row<i64>(row, shape.num_heads_q, shape.seqlen_q);
}
