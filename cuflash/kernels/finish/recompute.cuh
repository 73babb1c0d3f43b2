// Rows of gradients once more, from the definition, a warp a row. A product of tiles spreads a NaN
// or an infinity of its B operand, as 0 * NaN, to rows that do not see it. Only rows with a NaN or
// an infinity are looked at, and of them only those computed that something unseen may have
// reached. Slow, rare.
//
// Constants: Element, CAUSAL, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K; Arguments and the options, as
// in backward_steps.cuh.
#pragma once
#include "score/dropout.cuh"
#include "common/head_rows.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"

// Any row may be such a one: of packed sequences, as a tile reaches into the next one; and where an
// unseen pair has P = 0 and dS = 0 (dP - delta) as it comes (MASKS_DS, backward_steps.cuh), of
// which dP takes V's row and dO's, and may overflow, delta takes O's.
constexpr bool REACHES_ALL = PACKED || WINDOW || PAIRWISE;

// One query head, and its key head.
struct OneHead {
    const Shape& shape;
    Mask<CAUSAL, WINDOW> mask;
    PairMask pair_mask;
    ScoreMod<float> score_mod;
    Dropout<float> dropout;
    HeadRows q, dout, out, k, v;
    const float* lse;
    float scale;
    __device__ __forceinline__ OneHead(const Arguments& args, int batch, int head)
        : OneHead(args, arrays_of(args), batch, head) {}
    __device__ __forceinline__ OneHead(
        const Arguments& args, const BackwardArguments& arguments, int batch, int head)
        : shape(arguments.shape),
          mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)},
          pair_mask(args, batch),
          score_mod(args),
          dropout(args),
          q(arguments.q, arguments.q_stride, batch, head),
          dout(arguments.dout, arguments.dout_stride, batch, head),
          out(arguments.out, arguments.out_stride, batch, head),
          k(arguments.k, arguments.k_stride, batch, head / group_size()),
          v(arguments.v, arguments.v_stride, batch, head / group_size()),
          lse(static_cast<const float*>(arguments.lse)
              + (static_cast<i64>(batch) * shape.num_heads_q + head) * rows_of_head(args)),
          scale(static_cast<float>(arguments.scale)) {
        score_mod.set_head(args, batch, head);
        pair_mask.set_head(head);
        dropout.set_head(batch, head);
    }
    __device__ __forceinline__ int group_size() const {
        return shape.num_heads_q / shape.num_heads_kv;
    }
    __device__ __forceinline__ bool visible(int query, int key) const {
        return mask.visible(query, key) && pair_mask.visible(query, key);
    }
    // P, and the derivative of the score.
    __device__ __forceinline__ float p(int query, int key, float& derivative) const {
        const float product = row_product(q, query, k, key, shape.head_dim);
        const float distance = static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key);
        const float score =
            score_mod.score(product, distance, score_mod.bias_of(query, key), derivative);
        return weight(LINEAR ? product : score, LINEAR ? scale : 1.0f, effective_lse(lse[query]));
    }
    // What dO is weighted with.
    __device__ __forceinline__ float pz(int query, int key) const {
        float derivative;
        const float own = p(query, key, derivative);
        return DROPOUT ? own * dropout.z(query, key) : own;
    }
    __device__ __forceinline__ float scaled_ds(int query, int key) const {
        const float dp = row_product(dout, query, v, key, shape.head_dim_v);
        const float delta = row_product(dout, query, out, query, shape.head_dim_v);
        float derivative;
        const float own = p(query, key, derivative);
        const float taken = DROPOUT ? dp * dropout.z(query, key) : dp;
        return scale * (own * derivative * (taken - delta));
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

// Whether one of the tokens [first, end) that are not seen has a NaN or an infinity.
template <class Seen>
__device__ __forceinline__ bool has_nonfinite(
    const HeadRows& rows, int first, int end, int columns, Seen seen) {
    bool found = false;
    for (int token = first; token < end; ++token) {
        if (seen(token)) continue;
        for (int d = threadIdx.x % 32; d < columns; d += 32)
            found |= is_nonfinite(rows.at(token, d));
    }
    return __ballot_sync(WHOLE_WARP, found) != 0;
}
__device__ __forceinline__ bool has_nonfinite(const HeadRows& rows, int token, int columns) {
    return has_nonfinite(rows, token, token + 1, columns, [](int) { return false; });
}

// dQ: what may have reached it are keys that it does not see, of key tiles that its tile sees.
__device__ __forceinline__ void recompute_query(
    const Arguments& args, int batch, int head, int query) {
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const OneHead one(args, batch, head);
    const HeadRows dq(arguments.dq, arguments.dq_stride, batch, head);
    const KeyTiles tiles = one.mask.key_tiles(query / BLOCK_Q * BLOCK_Q, BLOCK_Q, BLOCK_K);
    const int taken = min(tiles.num_visited * BLOCK_K, shape.seqlen_k);
    if (!has_nonfinite(dq, query, shape.head_dim)) return;
    if (!REACHES_ALL && !has_nonfinite(one.k, 0, taken, shape.head_dim,
                                  [&](int key) { return one.visible(query, key); })) return;
    RowSum<HEAD_DIM> sum;
    for (int key = one.mask.first_key(query); key < one.mask.num_keys(query); ++key)
        if (one.visible(query, key)
            && !sum.add(one.scaled_ds(query, key), one.k, key, shape.head_dim)) break;
    sum.store(arguments.dq, arguments.dq_stride, batch, head, query, shape.head_dim);
}

// dV and dK: queries that do not see the key, of query tiles that see its tile.
__device__ __forceinline__ void recompute_key(
    const Arguments& args, int batch, int kv_head, int key) {
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const Mask<CAUSAL, WINDOW> mask{
        shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const int first_head = kv_head * group_size;
    const int first = mask.first_query(key), end = mask.end_query(key);
    const int k_start = key / BLOCK_K * BLOCK_K;
    const int first_taken = mask.query_tiles(k_start, BLOCK_Q, BLOCK_K).first * BLOCK_Q;
    bool of_v = REACHES_ALL, of_k = REACHES_ALL;
    for (int head = first_head; !REACHES_ALL && head < first_head + group_size; ++head) {
        const OneHead one(args, batch, head);
        const auto seen = [&](int query) { return one.visible(query, key); };
        of_v |= has_nonfinite(one.dout, first_taken, shape.seqlen_q, shape.head_dim_v, seen);
        of_k |= has_nonfinite(one.q, first_taken, shape.seqlen_q, shape.head_dim, seen);
    }
    const HeadRows dv(arguments.dv, arguments.dv_stride, batch, kv_head);
    const HeadRows dk(arguments.dk, arguments.dk_stride, batch, kv_head);
    if (of_v && has_nonfinite(dv, key, shape.head_dim_v)) {
        RowSum<HEAD_DIM_V> sum;
        for (int head = first_head; head < first_head + group_size; ++head) {
            const OneHead one(args, batch, head);
            for (int query = first; query < end; ++query)
                if (one.visible(query, key)
                    && !sum.add(one.pz(query, key), one.dout, query, shape.head_dim_v)) break;
        }
        sum.store(arguments.dv, arguments.dv_stride, batch, kv_head, key, shape.head_dim_v);
    }
    if (of_k && has_nonfinite(dk, key, shape.head_dim)) {
        RowSum<HEAD_DIM> sum;
        for (int head = first_head; head < first_head + group_size; ++head) {
            const OneHead one(args, batch, head);
            for (int query = first; query < end; ++query)
                if (one.visible(query, key)
                    && !sum.add(one.scaled_ds(query, key), one.q, query, shape.head_dim)) break;
        }
        sum.store(arguments.dk, arguments.dk_stride, batch, kv_head, key, shape.head_dim);
    }
}
