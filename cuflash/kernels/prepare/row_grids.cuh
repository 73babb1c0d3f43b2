// The grids on which the rows of a query tile sum dQ, if the sums are integers: see
// sm90/integer_dq.cuh. Part of prepare/row_stats.cu.
#pragma once
#include "common/mask.cuh"
#include "prepare/delta.cuh"
#include "sm90/integer_dq.cuh"

// is_wide: an error of the grid is half a step a key tile; at random, sqrt(tiles / 12) steps of
// bound_i / 2^29 at most. Where P is spread over n keys of typical sizes, a row of dQ / scale has
// the size |dO_i| A / (sqrt(n) HEAD_DIM), with A that of |K_j| |V_j|. With n = tiles * BLOCK_K and
// R = max|K_jc| max|V_j| sqrt(HEAD_DIM) / A, the error is
//
//     R n sqrt(HEAD_DIM / (12 BLOCK_K)) / 2^29
//
// of the row's size. It may be half of the unit roundoff of Element, as the errors of rounding P
// and dS are. A is the power mean of exponent -1/2, without zeros: a row may see none of the
// largest keys, so these must not count much, and no row sees only the few smallest. Normal data
// have R = 7: bfloat16 is wide from 500,000 keys on, float16 from 60,000 on.
constexpr float MOST_ERROR = FLOAT16_DQ ? 0x1p-12f : 0x1p-9f;
constexpr float WIDE_SQUARED = 0x1p58f * MOST_ERROR * MOST_ERROR * 12.0f * BLOCK_K / HEAD_DIM;

// What is added to norms, for squares that were too small to be stored: sqrt(256 * 2^-126).
constexpr float LEAST_NORM = 0x1p-59f;

// From here on |dO_i| max|V_j| + |delta_i| might round to infinity as a dS of float16, 65,504.
constexpr float OVERFLOWING_DS = 60000.0f;

// 1 / (1 - dropout).
template <class Arguments> inline float keep_factor_of(const Arguments& args) {
    if constexpr (DROPOUT) return static_cast<float>(args.options.keep_factor);
    else return 1.0f;
}

// The lane's shares of a row's dO * O and, INTEGER_DQ, of |dO|^2, from the same loads.
template <bool> struct RowProductsOf {
    Real dout_out;
    RowProductsOf(const Element* dout, const Element* out, int lane, int columns)
        : dout_out(partial_product(dout, out, lane, columns)) {}
    void store_norm(QueryRows&, int, int) const {}
};
template <> struct RowProductsOf<true> {
    Real dout_out = 0, dout_dout = 0;
    RowProductsOf(const Element* dout, const Element* out, int lane, int columns) {
        const auto add = [&](Element a, Element b) {
            const Real x = to_accumulator(a);
            dout_out = fma(x, to_accumulator(b), dout_out);
            dout_dout = fma(x, x, dout_dout);
        };
        for (int d = lane * CHUNK; d < columns; d += LANES * CHUNK) {
            if (d + CHUNK <= columns) {
                const Chunk a = *reinterpret_cast<const Chunk*>(dout + d);
                const Chunk b = *reinterpret_cast<const Chunk*>(out + d);
                for (int i = 0; i < CHUNK; ++i) add(a.x[i], b.x[i]);
            } else {
                for (int i = d; i < columns; ++i) add(dout[i], out[i]);
            }
        }
    }
    // |dO_i|^2 stands in place of the row's grid until set_grids().
    void store_norm(QueryRows& rows, int row, int lane) const {
        const Real squares = row_sum(dout_dout);
        if (lane == 0) rows.set_grid(row, __float_as_uint(squares));
    }
};
using RowProducts = RowProductsOf<INTEGER_DQ>;

inline int first_key_slot(NoSequence) { return 0; }
inline int first_key_slot(const Sequence& sequence) {
    return sequence.first_k / BLOCK_K + sequence.number;
}

// Over the key tiles that a query tile visits. By each warp, in a fixed order.
struct VisitedKeys {
    float k_max, v_max;                         // of |K_jc| and |V_j|, times 1 / (1 - dropout)
    bool is_wide;

    template <class Sequence>
    VisitedKeys(const Arguments& args, const Sequence& sequence, int batch, int head, int tile) {
        const Shape& shape = arrays_of(args).shape;
        const Mask<CAUSAL, WINDOW> mask{
            seqlen_q_of(args, sequence), seqlen_k_of(args, sequence), window_of<WINDOW>(args)};
        const KeyTiles visited = mask.key_tiles(tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
        const bool has_rows = tile * BLOCK_Q < mask.seqlen_q;
        const int count = has_rows ? max(visited.num_visited - visited.first, 0) : 0;
        const int kv_head = head / (shape.num_heads_q / shape.num_heads_kv);
        const KeyMaxima* tiles = key_maxima(
            args, {first_key_slot(sequence) + visited.first, kv_head, batch});
        KeyMaxima all = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int i = threadIdx.x % 32; i < count; i += 32) all.add(tiles[i]);
        for (int distance = 16; distance > 0; distance /= 2)
            all.add({__shfl_xor_sync(WHOLE_WARP, all.k, distance),
                     __shfl_xor_sync(WHOLE_WARP, all.v, distance),
                     __shfl_xor_sync(WHOLE_WARP, all.roots, distance),
                     __shfl_xor_sync(WHOLE_WARP, all.keys, distance)});
        const float keys = min(count * BLOCK_K, mask.seqlen_k), root = all.roots / all.keys;
        const float inverse_size = root * root * keys;      // n / A
        const float error = all.k * sqrtf(all.v) * inverse_size;
        is_wide = error * error * shape.head_dim > WIDE_SQUARED;
        k_max = all.k;
        v_max = (sqrtf(all.v) + LEAST_NORM) * keep_factor_of(args);
    }
};

// Sets the grids of all rows, and zeroes sums of `lo` if the tile is wide. lse: of the thread's
// row, if it has one; 0 if P follows from lse and a rest. Otherwise P exceeds 1 by the error of
// lse, up to a few times |lse| 2^-24, which only shows where lse is in the millions.
template <class Sequence>
inline void set_grids(const Arguments& args, const Sequence& sequence, int batch, int head,
                      int tile, QueryRows& rows, float lse) {
    if constexpr (!INTEGER_DQ) return;
    __syncthreads();                                        // norms and delta
    const VisitedKeys keys(args, sequence, batch, head, tile);
    const int row = threadIdx.x;
    bool may_overflow = false;
    u32 bits = 0;
    if (row < BLOCK_Q) {
        const float norm = sqrtf(__uint_as_float(rows.grid(row))) + LEAST_NORM;
        const float ds = norm * keys.v_max + fabsf(rows.delta[row]);
        const float excess = lse < infinity() ? exp2_approx(fabsf(lse) * 0x1p-20f) : 1.0f;
        bits = lse == lse ? DqGrid::of(ds * keys.k_max * excess) : 0;
        may_overflow = ds > OVERFLOWING_DS;
    }
    bits |= keys.is_wide ? DqGrid::WIDE : 0;
    if (FLOAT16_DQ && __syncthreads_or(may_overflow)) bits |= DqGrid::MAY_OVERFLOW;
    if (row < BLOCK_Q) rows.set_grid(row, bits);
    if (!keys.is_wide) return;
    int4* sums = reinterpret_cast<int4*>(
        static_cast<int*>(arrays_of(args).dq_sum)
        + (low_sums_distance(args) + i64(blockIdx.x) * SUMS_OF_TILE));
    for (int i = row; i < SUMS_OF_TILE / 4; i += NUM_THREADS) sums[i] = int4{0, 0, 0, 0};
}
