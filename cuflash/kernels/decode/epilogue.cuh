// decode/forward.cu's epilogue: the states of a block's warps, merged; O and lse of the block's
// keys. With SPLIT these are a part, in float, for finish/merge_splits.cu; the sink is its matter.
#pragma once
#include "decode/rows.cuh"
#include "score/sink.cuh"

// A warp's m, l and acc of all rows, to shared memory.
__device__ __forceinline__ void share_state(
    WarpStates& states, int warp, const Output& acc, const SoftmaxState& softmax) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = i * 16 + half * 8 + lane / 4;
            const float l = quad_sum(softmax.l[i][half]);
            if (lane % 4 == 0) {
                states.m[warp][row] = softmax.m[i][half];
                states.l[warp][row] = l;
            }
            #pragma unroll
            for (int j = 0; j < O_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x)
                    states.acc[warp][row][j * 8 + lane % 4 * 2 + x] = acc[i][j][half * 2 + x];
        }
}

// The factor that turns a warp's l and acc of a row into the merged ones.
struct MergedRow {
    float m, l, factors[NUM_WARPS];

    __device__ __forceinline__ MergedRow(const WarpStates& states, int row, float scale_log2)
        : m(-infinity()), l(0.0f) {
        #pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp) m = fmaxf(m, states.m[warp][row]);
        const float reference = finite_reference(m, scale_log2);
        #pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp) {
            factors[warp] = exp2_of_product(states.m[warp][row], scale_log2, reference);
            l += states.l[warp][row] * factors[warp];
        }
    }
};

// Rows that exist, a warp a row. The factor of a warp without a visible key is 0, and so is its
// acc, or NaN if a NaN is visible.
__device__ __forceinline__ void store_rows(
    const Arguments& args, const RowTile& rows, const WarpStates& states, float scale_log2) {
    const ForwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const int lane = threadIdx.x % 32;
    const float scale = LINEAR ? fabsf(static_cast<float>(arrays.scale)) : 1.0f;
    for (int row = threadIdx.x / 32; row < BLOCK_Q; row += NUM_WARPS) {
        const int query = rows.query_of(row), head = rows.head_of(row);
        if (query >= shape.seqlen_q) return;
        const MergedRow merged(states, row, scale_log2);
        float m = merged.m, l = merged.l, rescale = 1.0f;
        if constexpr (SINK && !SPLIT) {
            const WithSink<float> with_sink(
                m == -infinity() ? m : m * scale, l, sink_of<float>(args, head));
            l = with_sink.sum;
            rescale = with_sink.rescale;
            m = with_sink.top;
        } else {
            m *= scale;
        }
        const i64 index = (i64(rows.batch) * shape.num_heads_q + head) * shape.seqlen_q + query;
        const i64 part =
            SPLIT ? i64(rows.split) * shape.batch * shape.num_heads_q * shape.seqlen_q : 0;
        float* lse = SPLIT ? args.split_lse + part : static_cast<float*>(arrays.lse);
        if (lane == 0 && lse != nullptr) lse[index] = lse_of_row(m, l);
        const float inverse = l == 0.0f ? 0.0f : rescale / l;
        Element* out = static_cast<Element*>(arrays.out) + rows.batch * arrays.out_stride.batch
                     + head * arrays.out_stride.head + query * arrays.out_stride.token;
        for (int column = lane; column < shape.head_dim_v; column += 32) {
            float sum = 0.0f;
            #pragma unroll
            for (int warp = 0; warp < NUM_WARPS; ++warp)
                sum += states.acc[warp][row][column] * merged.factors[warp];
            if constexpr (SPLIT)
                args.split_out[(part + index) * shape.head_dim_v + column] = sum * inverse;
            else
                out[column] = from_accumulator<Element>(sum * inverse);
        }
    }
}
