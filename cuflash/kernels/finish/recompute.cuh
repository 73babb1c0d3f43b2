// Recomputes rows of dQ, dK and dV from the definition, a warp a row. A matmul spreads a NaN or an
// infinity of its B operand, as 0 * NaN, to rows that do not see it. So rows with a NaN or an
// infinity are recomputed, if a masked operand may have reached them. Slow, rare.
#pragma once
#include "score/dropout.cuh"
#include "score/lse_rest.cuh"
#include "common/head_rows.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"

// Whether any row may be affected. With PACKED, because a tile reaches into the next sequence. With
// WINDOW or PAIRWISE, because dS of a masked pair is not masked (MASK_DS,
// sm90/backward_constants.cuh): P = 0 makes it 0 * (dP - delta). dP, which may overflow, takes rows
// of V and dO, delta one of O, and dlse.
constexpr bool REACHES_ALL = PACKED || WINDOW || PAIRWISE;

// One query head and its key head.
struct HeadScores {
    const Shape& shape;
    Mask<CAUSAL, WINDOW> mask;
    PairMask pair_mask;
    ScoreMod<float> score_mod;
    Dropout<float> dropout;
    LseRests<float> rests;
    HeadRows q, dout, out, k, v;
    i64 first_row;                              // of lse and dlse
    const float *lse, *dlse;
    float scale;
    __device__ __forceinline__ HeadScores(const Arguments& args, int batch, int head)
        : HeadScores(args, arrays_of(args), batch, head) {}
    __device__ __forceinline__ HeadScores(
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
          first_row((static_cast<i64>(batch) * shape.num_heads_q + head) * rows_of_head(args)),
          lse(static_cast<const float*>(arguments.lse) + first_row),
          dlse(DLSE ? static_cast<const float*>(args.dlse) + first_row : nullptr),
          scale(static_cast<float>(arguments.scale)) {
        score_mod.set_head(args, batch, head);
        pair_mask.set_head(head);
        dropout.set_head(batch, head);
        rests.set_head(args, batch, head);
    }
    __device__ __forceinline__ int group_size() const {
        return shape.num_heads_q / shape.num_heads_kv;
    }
    __device__ __forceinline__ bool visible(int query, int key) const {
        return mask.visible(query, key) && pair_mask.visible(query, key);
    }
    // P and the derivative of the score.
    __device__ __forceinline__ float p(int query, int key, float& derivative) const {
        const float product = row_product(q, query, k, key, shape.head_dim);
        const float distance = static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key);
        Derivatives<float> derivatives;
        const float score = score_mod.score(product, distance, query, key, derivatives);
        derivative = derivatives.by_product;
        const float of_row = effective_lse(lse[query]);
        return LINEAR ? weight(product, scale, of_row)
                      : weight_beside(rests.of(query, of_row), score, of_row);
    }
    // P Z, the weight of dO in dV.
    __device__ __forceinline__ float pz(int query, int key) const {
        float derivative;
        const float weight = p(query, key, derivative);
        return DROPOUT ? weight * dropout.z(query, key) : weight;
    }
    __device__ __forceinline__ float scaled_ds(int query, int key) const {
        const float dp = row_product(dout, query, v, key, shape.head_dim_v);
        float delta = row_product(dout, query, out, query, shape.head_dim_v);
        if constexpr (DLSE) delta -= dlse[query];
        float derivative;
        const float weight = p(query, key, derivative);
        const float dropped_dp = DROPOUT ? dp * dropout.z(query, key) : dp;
        return scale * (weight * derivative * (dropped_dp - delta));
    }
};

// A weighted sum of rows; a lane holds the columns lane, lane + 32 and so on.
template <int COLUMNS> struct RowSum {
    static constexpr int COUNT = (COLUMNS + 31) / 32;
    float x[COUNT] = {};
    // Returns whether any column of the sum is not NaN. One that is infinite may still become NaN.
    __device__ __forceinline__ bool add(
        float factor, const HeadRows& rows, int token, int columns) {
        const int lane = threadIdx.x % 32;
        bool has_number = false;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (lane + i * 32 >= columns) continue;
            x[i] += factor * rows.at(token, lane + i * 32);
            has_number |= x[i] == x[i];
        }
        return __ballot_sync(WHOLE_WARP, has_number) != 0;
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

// Whether a row of the tokens [first, end) that are not visible has a NaN or an infinity.
template <class Visible>
__device__ __forceinline__ bool has_nonfinite(
    const HeadRows& rows, int first, int end, int columns, Visible visible) {
    bool found = false;
    for (int token = first; token < end; ++token) {
        if (visible(token)) continue;
        for (int d = threadIdx.x % 32; d < columns; d += 32)
            found |= is_nonfinite(rows.at(token, d));
    }
    return __ballot_sync(WHOLE_WARP, found) != 0;
}
__device__ __forceinline__ bool has_nonfinite(const HeadRows& rows, int token, int columns) {
    return has_nonfinite(rows, token, token + 1, columns, [](int) { return false; });
}

// dQ of a query. Masked keys of the key tiles that its tile visits may have reached it.
__device__ __forceinline__ void recompute_query(
    const Arguments& args, int batch, int head, int query) {
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const HeadScores scores(args, batch, head);
    const HeadRows dq(arguments.dq, arguments.dq_stride, batch, head);
    const KeyTiles tiles = scores.mask.key_tiles(query / BLOCK_Q * BLOCK_Q, BLOCK_Q, BLOCK_K);
    const int end_visited = min(tiles.num_visited * BLOCK_K, shape.seqlen_k);
    if (!has_nonfinite(dq, query, shape.head_dim)) return;
    if (!REACHES_ALL && !has_nonfinite(scores.k, 0, end_visited, shape.head_dim,
                                  [&](int key) { return scores.visible(query, key); })) return;
    RowSum<HEAD_DIM> sum;
    for (int key = scores.mask.first_key(query); key < scores.mask.num_keys(query); ++key)
        if (scores.visible(query, key)
            && !sum.add(scores.scaled_ds(query, key), scores.k, key, shape.head_dim)) break;
    sum.store(arguments.dq, arguments.dq_stride, batch, head, query, shape.head_dim);
}

// dV and dK of a key. Queries that do not see it, of the query tiles that visit its tile, may have
// reached them.
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
    const int first_visited = mask.query_tiles(k_start, BLOCK_Q, BLOCK_K).first * BLOCK_Q;
    bool reaches_dv = REACHES_ALL, reaches_dk = REACHES_ALL;
    for (int head = first_head; !REACHES_ALL && head < first_head + group_size; ++head) {
        const HeadScores scores(args, batch, head);
        const auto visible = [&](int query) { return scores.visible(query, key); };
        reaches_dv |= has_nonfinite(
            scores.dout, first_visited, shape.seqlen_q, shape.head_dim_v, visible);
        reaches_dk |= has_nonfinite(
            scores.q, first_visited, shape.seqlen_q, shape.head_dim, visible);
    }
    const HeadRows dv(arguments.dv, arguments.dv_stride, batch, kv_head);
    const HeadRows dk(arguments.dk, arguments.dk_stride, batch, kv_head);
    if (reaches_dv && has_nonfinite(dv, key, shape.head_dim_v)) {
        RowSum<HEAD_DIM_V> sum;
        for (int head = first_head; head < first_head + group_size; ++head) {
            const HeadScores scores(args, batch, head);
            for (int query = first; query < end; ++query)
                if (scores.visible(query, key)
                    && !sum.add(scores.pz(query, key), scores.dout, query, shape.head_dim_v)) break;
        }
        sum.store(arguments.dv, arguments.dv_stride, batch, kv_head, key, shape.head_dim_v);
    }
    if (reaches_dk && has_nonfinite(dk, key, shape.head_dim)) {
        RowSum<HEAD_DIM> sum;
        for (int head = first_head; head < first_head + group_size; ++head) {
            const HeadScores scores(args, batch, head);
            for (int query = first; query < end; ++query)
                if (scores.visible(query, key)
                    && !sum.add(scores.scaled_ds(query, key), scores.q, query, shape.head_dim))
                    break;
        }
        sum.store(arguments.dk, arguments.dk_stride, batch, kv_head, key, shape.head_dim);
    }
}
