// decode/forward.cu's epilogue: the states of a block's warps, merged: O and lse of a part.
#pragma once
#include "decode/results.cuh"
#include "decode/rows.cuh"

// A warp's m, l and acc of the rows that exist, to shared memory.
__device__ __forceinline__ void share_state(
    WarpStates& states, const RowTile& rows, const Output& acc, const SoftmaxState& softmax) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = i * 16 + half * 8 + lane / 4;
            const float l = quad_sum(softmax.l[i][half]);
            if (!rows.exists(row)) continue;
            if (lane % 4 == 0) {
                states.m[warp][row] = softmax.m[i][half];
                states.l[warp][row] = l;
            }
            #pragma unroll
            for (int j = 0; j < O_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x)
                    states.acc[warp][row][output_column(j, x)] = acc[i][j][half * 2 + x];
        }
}

// The factor that turns a warp's l and acc of a row into the merged ones.
struct MergedWarps {
    float m, l, factors[NUM_WARPS];

    __device__ __forceinline__ MergedWarps(const WarpStates& states, int row, float scale_log2)
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

// The part's rows, a warp a row. The factor of a warp without a visible key is 0, and so is its
// acc, or NaN if a NaN is visible.
__device__ __forceinline__ void store_part(
    const Arguments& args, const Part& part, const RowTile& rows, const WarpStates& states,
    float scale_log2) {
    const int lane = threadIdx.x % 32;
    const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
    const float v_scale = v_scale_of_head(args, rows.kv_head) / WEIGHT_FACTOR;
    for (int row = threadIdx.x / 32; row < BLOCK_Q && rows.exists(row); row += NUM_WARPS) {
        const MergedWarps merged(states, row, scale_log2);
        const float m = natural_max(merged.m, scale);
        const Result<float> result(args, part, rows, row, m, merged.l);
        if (lane == 0) result.store_lse();
        if (MAX_SCORE && lane == 0) result.store_max_score(m, merged.l);
        for (int column = lane; column < args.arrays.shape.head_dim_v; column += 32) {
            float sum = 0.0f;
            #pragma unroll
            for (int warp = 0; warp < NUM_WARPS; ++warp)
                sum += states.acc[warp][row][column] * merged.factors[warp];
            result.store(column, sum * v_scale);
        }
    }
}
