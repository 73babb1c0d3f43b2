// Rows of gradients once more, from the definition, a warp a row. A product of tiles spreads a NaN
// or an infinity of its B operand, as 0 * NaN, to rows that do not see it. Only rows with a NaN or
// an infinity are looked at, and of them only those computed that something unseen may have
// reached. Slow, rare.
//
// Constants: Element, CAUSAL, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K.
#pragma once
#include "head_rows.cuh"
#include "mask.cuh"

// One query head, and its key head.
struct OneHead {
    const Shape& shape;
    HeadRows q, dout, out, k, v;
    const float* lse;
    float scale;
    __device__ __forceinline__ OneHead(const BackwardArguments& arguments, int batch, int head)
        : shape(arguments.shape),
          q(arguments.q, arguments.q_stride, batch, head),
          dout(arguments.dout, arguments.dout_stride, batch, head),
          out(arguments.out, arguments.out_stride, batch, head),
          k(arguments.k, arguments.k_stride, batch, head / group_size()),
          v(arguments.v, arguments.v_stride, batch, head / group_size()),
          lse(static_cast<const float*>(arguments.lse)
              + (static_cast<i64>(batch) * shape.num_heads_q + head) * shape.seqlen_q),
          scale(static_cast<float>(arguments.scale)) {}
    __device__ __forceinline__ int group_size() const {
        return shape.num_heads_q / shape.num_heads_kv;
    }
    __device__ __forceinline__ float p(int query, int key) const {
        return weight(row_product(q, query, k, key, shape.head_dim), scale,
                      effective_lse(lse[query]));
    }
    __device__ __forceinline__ float scaled_ds(int query, int key) const {
        const float dp = row_product(dout, query, v, key, shape.head_dim_v);
        const float delta = row_product(dout, query, out, query, shape.head_dim_v);
        return scale * (p(query, key) * (dp - delta));
    }
};

// A sum of weighted rows; the lane has columns lane, lane + 32 and so on.
template <int COLUMNS> struct RowSum {
    static constexpr int COUNT = (COLUMNS + 31) / 32;
    float x[COUNT] = {};
    // Whether anything finite is left of the sum.
    __device__ __forceinline__ bool add(
        float factor, const HeadRows& rows, int token, int columns) {
        const int lane = threadIdx.x % 32;
        bool finite = false;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (lane + i * 32 >= columns) continue;
            x[i] += factor * rows.at(token, lane + i * 32);
            finite |= !is_nonfinite(x[i]);
        }
        return __ballot_sync(WHOLE_WARP, finite) != 0;
    }
    __device__ __forceinline__ void store(void* array, Strides stride, int batch, int head,
                                          int token, int columns) const {
        const int lane = threadIdx.x % 32;
        Element* row = static_cast<Element*>(array)
                     + batch * stride.batch + head * stride.head + token * stride.token;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (lane + i * 32 < columns)
                row[lane + i * 32] = low_half<Element>(pack<Element>(x[i], 0.0f));
    }
};

// Whether one of the tokens [first, end) has a NaN or an infinity.
__device__ __forceinline__ bool has_nonfinite(
    const HeadRows& rows, int first, int end, int columns) {
    bool found = false;
    for (int token = first; token < end; ++token)
        for (int d = threadIdx.x % 32; d < columns; d += 32)
            found |= is_nonfinite(rows.at(token, d));
    return __ballot_sync(WHOLE_WARP, found) != 0;
}

// dQ: what may have reached it are keys that it does not see, of key tiles that its tile sees.
__device__ __forceinline__ void repair_query(
    const BackwardArguments& arguments, int batch, int head, int query) {
    const Shape& shape = arguments.shape;
    const Mask<CAUSAL> mask{shape.seqlen_q, shape.seqlen_k};
    const OneHead one(arguments, batch, head);
    const HeadRows dq(arguments.dq, arguments.dq_stride, batch, head);
    const int seen = mask.num_keys(query), q_start = query / BLOCK_Q * BLOCK_Q;
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int taken = min(tiles.num_visited * BLOCK_K, shape.seqlen_k);
    if (!has_nonfinite(dq, query, query + 1, shape.head_dim)
        || !has_nonfinite(one.k, seen, taken, shape.head_dim)) return;
    RowSum<HEAD_DIM> sum;
    for (int key = 0; key < seen; ++key)
        if (!sum.add(one.scaled_ds(query, key), one.k, key, shape.head_dim)) break;
    sum.store(arguments.dq, arguments.dq_stride, batch, head, query, shape.head_dim);
}

// dV and dK: queries that do not see the key, of query tiles that see its tile.
__device__ __forceinline__ void repair_key(
    const BackwardArguments& arguments, int batch, int kv_head, int key) {
    const Shape& shape = arguments.shape;
    const Mask<CAUSAL> mask{shape.seqlen_q, shape.seqlen_k};
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const int first_head = kv_head * group_size;
    const int first = mask.first_query(key), k_start = key / BLOCK_K * BLOCK_K;
    const int first_taken = mask.query_tiles(k_start, BLOCK_Q, BLOCK_K).first * BLOCK_Q;
    bool of_v = false, of_k = false;
    for (int head = first_head; head < first_head + group_size; ++head) {
        const OneHead one(arguments, batch, head);
        of_v |= has_nonfinite(one.dout, first_taken, first, shape.head_dim_v);
        of_k |= has_nonfinite(one.q, first_taken, first, shape.head_dim);
    }
    const HeadRows dv(arguments.dv, arguments.dv_stride, batch, kv_head);
    const HeadRows dk(arguments.dk, arguments.dk_stride, batch, kv_head);
    if (of_v && has_nonfinite(dv, key, key + 1, shape.head_dim_v)) {
        RowSum<HEAD_DIM_V> sum;
        for (int head = first_head; head < first_head + group_size; ++head) {
            const OneHead one(arguments, batch, head);
            for (int query = first; query < shape.seqlen_q; ++query)
                if (!sum.add(one.p(query, key), one.dout, query, shape.head_dim_v)) break;
        }
        sum.store(arguments.dv, arguments.dv_stride, batch, kv_head, key, shape.head_dim_v);
    }
    if (of_k && has_nonfinite(dk, key, key + 1, shape.head_dim)) {
        RowSum<HEAD_DIM> sum;
        for (int head = first_head; head < first_head + group_size; ++head) {
            const OneHead one(arguments, batch, head);
            for (int query = first; query < shape.seqlen_q; ++query)
                if (!sum.add(one.scaled_ds(query, key), one.q, query, shape.head_dim)) break;
        }
        sum.store(arguments.dk, arguments.dk_stride, batch, kv_head, key, shape.head_dim);
    }
}
