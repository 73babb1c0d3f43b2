// Epilogue of forward.cu: O = acc / l, lse = |scale| m + log(l), and their stores.
#pragma once
#include "score/max_score.cuh"
#include "sm90/forward_work.cuh"
#include "sm90/forward_softmax.cuh"

constexpr int NAN_BITS = 0x7FC00000;
constexpr float LN_2 = 0.6931471805599453f;

// ---- Addresses of a query tile's results ----

// A number of each row, as lse is, from its first query on.
__device__ __forceinline__ float* numbers_of(const Shape& shape, QueryTile tile, void* numbers) {
    const i64 rows = (i64{tile.batch} * shape.num_heads_q + tile.head) * shape.seqlen_q;
    return static_cast<float*>(numbers) + rows + tile.first_q + tile.q_start;
}

// lse of its first query; null if the call has no lse.
__device__ __forceinline__ float* lse_of(const ForwardArguments& arrays, QueryTile tile) {
    if (arrays.lse == nullptr) return nullptr;
    return numbers_of(arrays.shape, tile, arrays.lse);
}

// max_score of its first query; null without MAX_SCORE.
__device__ __forceinline__ float* max_score_of(const Arguments& args, QueryTile tile) {
    if (!MAX_SCORE) return nullptr;
    return numbers_of(args.arrays.shape, tile, max_scores<float>(args));
}

// A row's m in the units of scores.
__device__ __forceinline__ float natural_max(const Arguments& args, float m) {
    return natural_max(m, LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f);
}

// O of its first query.
__device__ __forceinline__ Element* out_of(const ForwardArguments& arrays, QueryTile tile) {
    const Strides stride = arrays.out_stride;
    return static_cast<Element*>(arrays.out) + tile.batch * stride.batch
         + tile.head * stride.head + (tile.first_q + tile.q_start) * stride.token;
}

// ---- Normalisation ----

// O = inverse * acc.
struct RowResult { float inverse, lse; };

// The result of a row of maximum m and sum l, with its head's sink. `excess`: the factor by which l
// and acc are too large (online_softmax).
__device__ __forceinline__ RowResult finish_row(
    const Arguments& args, float m, float l, float excess, int head) {
    const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
    const bool no_key = m == -infinity();
    const WithSink<float> row(no_key ? m : m * scale, l / excess, sink_of<float>(args, head));
    if (row.sum == 0.0f) return {0.0f, -infinity()};
    return {row.rescale / (excess * row.sum), lse_of_row(row.top, row.sum)};
}

// c m, rounded: what a row's P are relative to; 0 if the row sees no key. With MAX_SCORE m is the
// row's true maximum, but P are relative to an older one (max_scaled), and may reach 2^15.
__device__ __forceinline__ float finite_max_scaled(float m, float scale_log2, float max_scaled) {
    if constexpr (MAX_SCORE) return m == -infinity() ? 0.0f : max_scaled;
    else return finite_max_scaled(m, scale_log2);
}

// 2^(c m - round(c m)): see online_softmax.
__device__ __forceinline__ float excess_of(float m, float scale_log2, float max_scaled) {
    return m == -infinity()
        ? 1.0f
        : exp2_approx(fmaf(m, scale_log2, -finite_max_scaled(m, scale_log2, max_scaled)));
}

// acc becomes O; stores lse. Rows that saw no key get 0 and -inf. A sink adds its weight to l.
//
// False if a row of the warp needs recompute_row; the first element of such a row becomes NaN.
__device__ __forceinline__ bool normalise(
    const Arguments& args, float (&acc)[O_COUNT], const RowState& rows, float scale_log2, int row,
    const QueryTile& tile, float* lse) {
    const int head = PACKED && is_none(args, tile) ? NO_HEAD : tile.head;
    bool exact = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float m = MAX_SCORE ? quad_max(rows.max[half]) : rows.max[half];
        const float l = quad_sum(rows.sum[half]), reference = rows.max_scaled[half];
        const float inverse =
            SINK ? finish_row(args, m, l, excess_of(m, scale_log2, reference), head).inverse
                 : l == 0.0f ? 0.0f : __fdividef(1.0f, l);
        #pragma unroll
        for (int j = 0; j < O_COUNT / 4; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x) {
                float& o = acc[j * 4 + half * 2 + x];
                o *= inverse;
                // P = 0 times a NaN or an infinity of V is NaN, also in rows that do not see its
                // key; and P above 1 (softmax_with_old_max) may overflow acc.
                exact &= fabsf(o) < infinity();
            }
        const float max_scaled = finite_max_scaled(m, scale_log2, reference);
        exact &= l < infinity() && fabsf(max_scaled) < 0x1p24f;
        if (lse != nullptr && threadIdx.x % 4 == 0 && row + half * 8 < tile.num_rows) {
            if constexpr (SINK) {
                lse[row + half * 8] =
                    finish_row(args, m, l, excess_of(m, scale_log2, reference), head).lse;
            } else {
                const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
                const float log_excess = fmaf(m, scale_log2, -max_scaled) * LN_2;
                lse[row + half * 8] =
                    l == 0.0f ? -infinity() : m * scale + (logf(l) - log_excess);
            }
        }
        if (MAX_SCORE && threadIdx.x % 4 == 0 && row + half * 8 < tile.num_rows)
            max_score_of(args, tile)[row + half * 8] =
                max_score_of_row(natural_max(args, m), l);
    }
    const u32 inexact = __ballot_sync(WHOLE_WARP, !exact);
    const bool mark = (inexact >> threadIdx.x % 32 / 4 * 4 & 0xF) != 0;
    if (mark) acc[0] = acc[2] = __int_as_float(NAN_BITS);
    return inexact == 0;
}

// ---- Stores ----

// The warp's 16 rows of O to shared memory: `rows` points at the first in a tile of BLOCK_Q rows.
__device__ __forceinline__ void stage_rows(u32 rows, const float (&o)[O_COUNT]) {
    const int lane = threadIdx.x % 32;
    const u32 lane_chunk = rows + tile_offset<BLOCK_Q>(lane % 16, lane / 16 * 8);
    #pragma unroll
    for (int j = 0; j < O_COUNT / 8; ++j) {                 // 16 rows, 16 columns
        const u32 panel = j / 4 * (BLOCK_Q * PANEL_ROW_BYTES);
        stmatrix_x4((lane_chunk ^ (j % 4 * 2 * CHUNK_BYTES)) + panel,
                    pack<Element>(o[j * 8], o[j * 8 + 1]),
                    pack<Element>(o[j * 8 + 2], o[j * 8 + 3]),
                    pack<Element>(o[j * 8 + 4], o[j * 8 + 5]),
                    pack<Element>(o[j * 8 + 6], o[j * 8 + 7]));
    }
}
