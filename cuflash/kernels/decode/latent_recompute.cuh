// Rows of forward_latent.cu in whose sums a NaN or an infinity of a masked value became 0 * NaN:
// computed anew from the definition, by a warp. Slow, rare.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/key_rows.cuh"
#include "decode/lane_rows.cuh"
#include "decode/results.cuh"

// A row's keys of a part.
struct PartRow {
    const Arguments& args;
    const Part& part;
    const LaneRows::Row row;
    const int lane = threadIdx.x % 32;
    const Mask<CAUSAL, WINDOW> mask;
    const int first, end;                                   // of the keys that it sees
    const Pages<Arguments> pages;
    const KeyRows keys;
    const Element* q;

    __device__ __forceinline__ PartRow(
        const Arguments& args, const Part& part, const RowTile& rows, int index)
        : args(args), part(part), row(args, rows, index), mask(mask_of(args, part.sequence)),
          first(max(mask.first_key(row.query), part.first_tile * BLOCK_K)),
          end(min(mask.num_keys(row.query), part.end_tile * BLOCK_K)),
          pages{args, part.sequence.number},
          keys(args, args.arrays.k, args.arrays.k_stride, part.sequence, part.kv_head),
          q(static_cast<const Element*>(args.arrays.q)
            + rows.offset(args.arrays.q_stride, index)) {}

    // Calls f(k, score) for each key, with its row.
    template <class F> __device__ __forceinline__ void for_each_key(F f) const {
        #pragma unroll 1
        for (int key = first; key < end; ++key) {
            const int page = pages.of_key(key);
            if (page < 0 || !row.sees(mask, key)) continue;
            const Element* k = reinterpret_cast<const Element*>(keys.row(page, key));
            float s = 0.0f;
            #pragma unroll 1
            for (int column = lane; column < args.arrays.shape.head_dim; column += 32)
                s += to_float(q[column]) * to_float(k[column]);
            #pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                s += __shfl_xor_sync(WHOLE_WARP, s, distance);
            if constexpr (!LINEAR) {
                const int shift = part.sequence.seqlen_k - part.sequence.seqlen_q;
                s = row.score_mod.score(
                    s, static_cast<float>(row.query + shift - key), row.query, key);
            }
            f(k, NEGATE_SCORES ? -s : s);
        }
    }
};

// Stores COLUMNS columns of O of a row, from first_column on.
template <int COLUMNS>
__device__ __forceinline__ void recompute_row(
    const Arguments& args, const Part& part, const RowTile& rows, int row, int first_column) {
    const PartRow keys(args, part, rows, row);
    const int head_dim_v = args.arrays.shape.head_dim_v;
    const ScaledExp2 exp{exponent_scale<LINEAR>(args.arrays.scale)};
    float m = -infinity(), l = 0.0f, acc[COLUMNS / 32] = {};
    keys.for_each_key([&](const Element*, float score) { m = fmaxf(m, score); });
    const float reference = exp.reference(m);
    keys.for_each_key([&](const Element* k, float score) {
        const float p = exp(score, reference);
        l += p;
        #pragma unroll
        for (int i = 0; i < COLUMNS / 32; ++i)
            if (first_column + keys.lane + i * 32 < head_dim_v)
                acc[i] += p * to_float(k[first_column + keys.lane + i * 32]);
    });
    const float scale = LINEAR ? fabsf(static_cast<float>(args.arrays.scale)) : 1.0f;
    const Result<float> result(args, part, rows, row, natural_max(m, scale), l);
    #pragma unroll
    for (int i = 0; i < COLUMNS / 32; ++i)
        if (first_column + keys.lane + i * 32 < head_dim_v)
            result.store(first_column + keys.lane + i * 32, acc[i]);
}

// Recomputes the rows of all of the block's parts that have an infinity in first_column, which may
// be their true result, among the warp's 16 from first_row on.
template <int COLUMNS>
__device__ __forceinline__ void recompute_rows(
    const Arguments& args, int first_row, int first_column) {
    Parts parts(args);
    Part part;
    while (parts.next(part)) {
        const RowTile rows(args, part);
        #pragma unroll 1
        for (int row = first_row; row < first_row + 16 && rows.exists(row); ++row) {
            const Result<float> result(args, part, rows, row, 0.0f, 1.0f);
            const float x = result.is_part ? result.part_out[first_column]
                                           : to_float(result.out[first_column]);
            __syncwarp();                                   // before recompute_row writes there
            if (fabsf(x) == infinity())
                recompute_row<COLUMNS>(args, part, rows, row, first_column);
        }
    }
}
