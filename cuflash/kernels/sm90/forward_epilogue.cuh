// The end of a tile of queries in forward.cu: O = acc / l, lse = |scale| m + log(l), their stores.
#pragma once
#include "sm90/forward_softmax.cuh"

// What a row of maximum m and sum l comes to with its head's sink: O = inverse * acc. P is `excess`
// of what it should be, in l and acc (see softmax()).
struct RowEnd { float inverse, lse; };

__device__ __forceinline__ RowEnd end_of_row(
    const Arguments& args, float m, float l, float excess, int head) {
    const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
    const bool nothing = m == -infinity();
    const WithSink<float> row(nothing ? m : m * scale, l / excess, sink_of<float>(args, head));
    if (row.sum == 0.0f) return {0.0f, -infinity()};
    return {row.rescale / (excess * row.sum), lse_of_row(row.top, row.sum)};
}

// What softmax() multiplies a row's P by: 2^(c m - round(c m)).
__device__ __forceinline__ float excess_of(float m, float c) {
    return m == -infinity() ? 1.0f : exp2_approx(fmaf(m, c, -reference(m, c)));
}

// acc becomes O = acc / l, lse = |scale| m + log(l); rows that saw no key: 0 and -inf. Says whether
// that is the result for both rows of all the warp's lanes. If not, such rows begin with a NaN.
// A sink takes part in l.
__device__ __forceinline__ bool normalise(
    const Arguments& args, float (&acc)[O_COUNT], const Rows& rows, float c, int row,
    const Queries& queries, float* lse) {
    const ForwardArguments& arguments = args.arrays;
    const int num_rows = queries.num_rows;
    const int head = PACKED && is_none(args, queries) ? NO_HEAD : queries.head;
    bool exact = true;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float m = rows.m[half], l = quad_sum(rows.l[half]);
        const float inverse = SINK ? end_of_row(args, m, l, excess_of(m, c), head).inverse
                            : l == 0.0f ? 0.0f : __fdividef(1.0f, l);
        #pragma unroll
        for (int j = 0; j < O_COUNT / 4; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x) {
                float& o = acc[j * 4 + half * 2 + x];
                o *= inverse;
                // A NaN or an infinity of V spreads to rows that do not see it too, as 0 * NaN. And
                // weights above 1 may have been too much.
                if (MASKED || OPTIONS) exact &= fabsf(o) < infinity();
            }
        const float subtracted = reference(m, c);
        exact &= l < infinity() && fabsf(subtracted) < 0x1p24f;
        if (lse != nullptr && threadIdx.x % 4 == 0 && row + half * 8 < num_rows) {
            if constexpr (SINK) {
                lse[row + half * 8] = end_of_row(args, m, l, excess_of(m, c), head).lse;
            } else {
                const float scale = LINEAR ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
                const float rest = fmaf(m, c, -subtracted) * LN_2;
                lse[row + half * 8] = l == 0.0f ? -infinity() : m * scale + (logf(l) - rest);
            }
        }
    }
    const u32 inexact = __ballot_sync(WHOLE_WARP, !exact);
    const bool mark = (inexact >> threadIdx.x % 32 / 4 * 4 & 0xF) != 0;
    if (mark) acc[0] = acc[2] = __int_as_float(NAN_BITS);
    return inexact == 0;
}

// Where lse of the first of the queries belongs, null if it is not wanted.
__device__ __forceinline__ float* lse_of(const ForwardArguments& arguments, Queries queries) {
    const Shape& shape = arguments.shape;
    if (arguments.lse == nullptr) return nullptr;
    const i64 rows = (i64{queries.batch} * shape.num_heads_q + queries.head) * shape.seqlen_q;
    return static_cast<float*>(arguments.lse) + rows + queries.first_q + queries.first;
}

// The row of O of the first of the queries.
__device__ __forceinline__ Element* out_of(const ForwardArguments& arguments, Queries queries) {
    const Strides stride = arguments.out_stride;
    return static_cast<Element*>(arguments.out) + queries.batch * stride.batch
         + queries.head * stride.head + (queries.first_q + queries.first) * stride.token;
}

// The warp's 16 rows of O as a tile of BLOCK_Q rows, from the row on at which `rows` points.
__device__ __forceinline__ void store_to_tile(u32 rows, const float (&o)[O_COUNT]) {
    const int lane = threadIdx.x % 32;
    const u32 chunk_of_lane = rows + tile_offset<BLOCK_Q>(lane % 16, lane / 16 * 8);
    #pragma unroll
    for (int j = 0; j < O_COUNT / 8; ++j) {                 // 16 rows, 16 columns
        const u32 panel = j / 4 * (BLOCK_Q * PANEL_ROW_BYTES);
        stmatrix_x4((chunk_of_lane ^ (j % 4 * 2 * CHUNK_BYTES)) + panel,
                    pack<Element>(o[j * 8], o[j * 8 + 1]),
                    pack<Element>(o[j * 8 + 2], o[j * 8 + 3]),
                    pack<Element>(o[j * 8 + 4], o[j * 8 + 5]),
                    pack<Element>(o[j * 8 + 6], o[j * 8 + 7]));
    }
}
