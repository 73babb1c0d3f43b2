// The grids on which the rows of a query tile sum dQ, if the sums are integers: see
// sm90/integer_dq.cuh. Part of prepare/row_stats.cu.
//
// Constants: CAUSAL, WINDOW, DROPOUT, LANES, and those of integer_dq.cuh.
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

// By all threads of a block.
template <bool> struct TileGridOf {
    template <class Sequence>
    TileGridOf(const Arguments&, const Sequence&, int, int, int) {}
    int limbs() const { return 1; }
    void store_row(QueryRows&, int, const Element*, int, int, const float*, float) const {}
    void store_flags(QueryRows&) const {}
};

template <> struct TileGridOf<true> {
    float k_max, v_max;                         // of |K_jc| and |V_j|, times 1 / (1 - dropout)
    u32 is_wide;
    mutable bool may_overflow = false;          // in one of the thread's rows

    // Maxima over the key tiles that the query tile visits. By each warp, in a fixed order.
    template <class Sequence>
    TileGridOf(const Arguments& args, const Sequence& sequence, int batch, int head, int tile) {
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
        v_max = sqrtf(all.v) + LEAST_NORM;
        v_max *= keep_factor_of(args);
    }

    static int first_key_slot(NoSequence) { return 0; }
    static int first_key_slot(const Sequence& sequence) {
        return sequence.first_k / BLOCK_K + sequence.number;
    }

    int limbs() const { return is_wide ? 2 : 1; }

    // The grid of row i, by its lanes. P exceeds 1 by the error of lse, up to a few times
    // |lse| 2^-24, which only shows where lse is in the millions.
    void store_row(QueryRows& rows, int i, const Element* dout, int lane, int columns,
                   const float* row_lse, float delta) const {
        const float lse = columns > 0 ? effective_lse(*row_lse) : infinity();
        const float norm =
            sqrtf(row_sum(partial_product(dout, dout, lane, columns))) + LEAST_NORM;
        const float ds = norm * v_max + fabsf(delta);
        const float excess = lse < infinity() ? exp2_approx(fabsf(lse) * 0x1p-20f) : 1.0f;
        const u32 bits = lse == lse ? DqGrid::of(ds * k_max * excess) : 0;
        may_overflow |= ds > OVERFLOWING_DS;
        if (lane == 0) rows.set_grid(i, bits | (is_wide ? DqGrid::WIDE : 0));
    }

    // Whether a dS may overflow, in the first row's grid alone.
    void store_flags(QueryRows& rows) const {
        if constexpr (!FLOAT16_DQ) return;
        const bool any = __syncthreads_or(may_overflow);
        if (threadIdx.x == 0 && any) rows.set_grid(0, rows.grid(0) | DqGrid::MAY_OVERFLOW);
    }
};
using TileGrid = TileGridOf<INTEGER_DQ>;
