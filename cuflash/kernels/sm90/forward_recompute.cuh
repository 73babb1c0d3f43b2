// Rows whose result may be wrong by forward.cu's arithmetic (NaN, infinities, scores above 2^24):
// recomputed from the definition, one warp per row. Slow, rare.
#pragma once
#include "sm90/forward_epilogue.cuh"
#include "sm90/forward_scheduler.cuh"

// One query's arrays, score function and masks.
struct QueryRow {
    const Arguments& args;
    const Shape& shape;
    int query, kv_head;
    Mask<CAUSAL, WINDOW> mask;
    int first_key, end_key;                                 // that it sees, ignoring `pairs`
    PairMask pairs;
    ScoreMod<float> score_mod;
    Dropout<float> dropout;
    const Element *q, *k, *v;
    i64 k_stride, v_stride;

    __device__ __forceinline__ QueryRow(const Arguments& args, int query, int head, int batch)
        : args(args), shape(args.arrays.shape), query(query),
          kv_head(head / (shape.num_heads_q / shape.num_heads_kv)),
          mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)},
          first_key(mask.first_key(query)), end_key(mask.num_keys(query)),
          pairs(args, batch), score_mod(args), dropout(args) {
        pairs.set_head(head);
        score_mod.set_head(args, batch, head);
        dropout.set_head(batch, head);
        const ForwardArguments& arrays = args.arrays;
        const Strides qs = arrays.q_stride, ks = arrays.k_stride, vs = arrays.v_stride;
        q = static_cast<const Element*>(arrays.q)
          + batch * qs.batch + head * qs.head + query * qs.token;
        k = static_cast<const Element*>(arrays.k) + batch * ks.batch + kv_head * ks.head;
        v = static_cast<const Element*>(arrays.v) + batch * vs.batch + kv_head * vs.head;
        k_stride = ks.token;
        v_stride = vs.token;
    }
    __device__ __forceinline__ bool is_masked(int key) const {
        return PAIRWISE && !pairs.visible(query, key);
    }
    __device__ __forceinline__ float score(int key) const {
        float s = 0.0f;
        for (int d = 0; d < shape.head_dim; ++d)
            s += to_float(q[d]) * to_float(k[key * k_stride + d]);
        if (!LINEAR)
            s = score_mod.score(
                s, static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key),
                query, key);
        return NEGATE_SCORES ? -s : s;
    }
};

__device__ __forceinline__ void recompute_row(
    const Arguments& args, int query, int head, int batch, float scale_log2, Element* out,
    float* lse, float* max_score) {
    const QueryRow row(args, query, head, batch);
    const Shape& shape = args.arrays.shape;
    const int lane = threadIdx.x % 32;
    const int first = row.first_key, end = row.end_key;
    constexpr int COLUMNS = (HEAD_DIM_V + 31) / 32;         // of a lane
    float m = -infinity(), l = 0.0f, acc[COLUMNS] = {};
    for (int key = first + lane; key < end; key += 32)
        if (!row.is_masked(key)) m = fmaxf(m, row.score(key));
    for (int i = 1; i < 32; i *= 2) m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, i));
    const float subtrahend = finite_reference(m, scale_log2);
    for (int start = first; start < end; start += 32) {
        const bool masked = PAIRWISE && start + lane < end && row.is_masked(start + lane);
        const u32 masked_keys = PAIRWISE ? __ballot_sync(WHOLE_WARP, masked) : 0u;
        const float lane_p = start + lane < end && !masked
            ? exp2_of_product(row.score(start + lane), scale_log2, subtrahend) : 0.0f;
        for (int i = 0; i < min(32, end - start); ++i) {
            const float p = __shfl_sync(WHOLE_WARP, lane_p, i);
            if (PAIRWISE && (masked_keys >> i & 1) != 0) continue;
            const float kept = DROPOUT ? p * row.dropout.z(query, start + i) : p;
            l += p;
            #pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (lane + j * 32 < shape.head_dim_v)
                    acc[j] += kept * to_float(row.v[(start + i) * row.v_stride + lane + j * 32]);
        }
    }
    const float inverse = SINK ? finish_row(args, m, l, 1.0f, head).inverse
                        : l == 0.0f ? 0.0f : 1.0f / l;
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
        if (lane + j * 32 < shape.head_dim_v)
            out[lane + j * 32].bits = static_cast<u16>(pack<Element>(acc[j] * inverse, 0.0f));
    if (lse != nullptr && lane == 0) {
        const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
        *lse = SINK ? finish_row(args, m, l, 1.0f, head).lse : lse_of_row(m * scale, l);
    }
    if (MAX_SCORE && lane == 0) *max_score = max_score_of_row(natural_max(args, m), l);
}

// Recomputes the rows that begin with a NaN (which may be their true result), among num_rows rows
// from `first` on of all of the block's tiles. last_tile: the number of its last tile, with
// DYNAMIC_SCHEDULER. SECOND: another column that may hold the NaN, if it exists; 0: none.
template <int SECOND = 0>
__device__ __forceinline__ void recompute_rows(
    const Arguments& args, int first, float scale_log2, int last_tile, int num_rows = 16) {
    const ForwardArguments& arrays = args.arrays;
    TileScheduler scheduler(args, last_tile);
    __syncwarp();                                           // the warp's stores are done
    for (;;) {
        const QueryTile tile = scheduler.revisit(args);
        if (tile.num_rows == 0) return;
        for (int row = first; row < min(first + num_rows, tile.num_rows); ++row) {
            Element* out = out_of(arrays, tile) + row * arrays.out_stride.token;
            float* lse = lse_of(arrays, tile);
            float* max_score = max_score_of(args, tile);
            bool marked = !(fabsf(to_float(out[0])) <= infinity());
            if (SECOND > 0 && SECOND < arrays.shape.head_dim_v)
                marked |= !(fabsf(to_float(out[SECOND])) <= infinity());
            __syncwarp();                                   // before recompute_row writes there
            if (marked)
                recompute_row(
                    sequence_arguments(args, tile, BLOCK_Q), tile.q_start + row, tile.head,
                    tile.batch, scale_log2, out, lse == nullptr ? lse : lse + row,
                    max_score + row);
        }
    }
}
