// Rows that need more than forward.cu's arithmetic gives, once more from the definition.
#pragma once
#include "sm90/forward_epilogue.cuh"
#include "sm90/forward_scheduler.cuh"

// One row from the definition, by one warp.
__device__ __forceinline__ void recompute_row(
    const Arguments& args, int query, int head, int batch, float c, Element* out,
    float* lse) {
    const ForwardArguments& arguments = args.arrays;
    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % 32;
    const int kv_head = head / (shape.num_heads_q / shape.num_heads_kv);
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int first = mask.first_key(query), seen = mask.num_keys(query);
    Pairs pairs(args, batch);
    pairs.set_head(head);
    ScoreMod<float> steps(args);
    steps.set_head(args, batch, head);
    Dropout<float> dropout(args);
    dropout.set_head(batch, head);
    const auto hides = [&](int key) { return PAIRWISE && !pairs.visible(query, key); };
    const Strides qs = arguments.q_stride, ks = arguments.k_stride, vs = arguments.v_stride;
    const Element* q = static_cast<const Element*>(arguments.q)
                     + batch * qs.batch + head * qs.head + query * qs.token;
    const Element* k = static_cast<const Element*>(arguments.k)
                     + batch * ks.batch + kv_head * ks.head;
    const Element* v = static_cast<const Element*>(arguments.v)
                     + batch * vs.batch + kv_head * vs.head;
    const auto score = [&](int key) {
        float s = 0.0f;
        for (int d = 0; d < shape.head_dim; ++d)
            s += to_float(q[d]) * to_float(k[key * ks.token + d]);
        if (!LINEAR)
            s = steps.score(
                s, static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key),
                steps.bias_of(query, key));
        return NEGATE_SCORES ? -s : s;
    };
    constexpr int COLUMNS = (HEAD_DIM_V + 31) / 32;         // of a lane
    float m = -infinity(), l = 0.0f, acc[COLUMNS] = {};
    for (int key = first + lane; key < seen; key += 32)
        if (!hides(key)) m = fmaxf(m, score(key));
    for (int i = 1; i < 32; i *= 2) m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, i));
    const float subtracted = finite_reference(m, c);
    for (int start = first; start < seen; start += 32) {
        const bool hidden = PAIRWISE && start + lane < seen && hides(start + lane);
        const u32 left_out = PAIRWISE ? __ballot_sync(WHOLE_WARP, hidden) : 0u;
        const float mine = start + lane < seen && !hidden
            ? exp2_of_product(score(start + lane), c, subtracted) : 0.0f;
        for (int i = 0; i < min(32, seen - start); ++i) {
            const float p = __shfl_sync(WHOLE_WARP, mine, i);
            if (PAIRWISE && (left_out >> i & 1) != 0) continue;
            const float kept = DROPOUT ? p * dropout.z(query, start + i) : p;
            l += p;
            #pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (lane + j * 32 < shape.head_dim_v)
                    acc[j] += kept * to_float(v[(start + i) * vs.token + lane + j * 32]);
        }
    }
    const float inverse = SINK ? end_of_row(args, m, l, 1.0f, head).inverse
                        : l == 0.0f ? 0.0f : 1.0f / l;
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
        if (lane + j * 32 < shape.head_dim_v)
            out[lane + j * 32].bits = static_cast<u16>(pack<Element>(acc[j] * inverse, 0.0f));
    if (lse != nullptr && lane == 0) {
        const float scale = LINEAR ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
        *lse = SINK ? end_of_row(args, m, l, 1.0f, head).lse
             : lse_of_row(m * scale, l);
    }
}

// Computes again what begins with a NaN, in the warp's rows of all the block's tiles. That may be
// the result, too. last_tile: the number of the last one, if they are DYNAMIC_SCHEDULER.
__device__ __forceinline__ void recompute_rows(
    const Arguments& arguments, int warp_row, float c, int last_tile) {
    const ForwardArguments& arrays = arguments.arrays;
    Tiles tiles(arguments, last_tile);
    __syncwarp();                                           // the warp's stores are done
    for (;;) {
        const Queries queries = tiles.again(arguments);
        if (queries.num_rows == 0) return;
        for (int row = warp_row; row < min(warp_row + 16, queries.num_rows); ++row) {
            Element* out = out_of(arrays, queries) + row * arrays.out_stride.token;
            float* lse = lse_of(arrays, queries);
            const bool marked = !(fabsf(to_float(out[0])) <= infinity());
            __syncwarp();                                   // before recompute_row writes there
            if (marked)
                recompute_row(of_sequence(arguments, queries, BLOCK_Q), queries.first + row,
                          queries.head, queries.batch, c, out, lse == nullptr ? lse : lse + row);
        }
    }
}
