// What a decode kernel leaves: O and lse of a row tile, or of a part of its keys, which
// finish/merge_parts.cu merges.
#pragma once
#include "common/elements.cuh"
#include "decode/row_tile.cuh"
#include "score/max_score.cuh"
#include "score/sink.cuh"

// Numbers that a part leaves of a row beside O: lse, and max_score if it is wanted.
constexpr int PART_NUMBERS = MAX_SCORE ? 2 : 1;

// Where a row goes that has maximum m, in natural units, and sum l. A part's row is stored without
// the sink.
template <class Real> struct Result {
    Element* out;                                           // of the whole row
    Real *lse, *max_score, *part_out, *part_lse;
    Real row_lse, inverse;
    bool is_part;

    __device__ __forceinline__ Result(const Arguments& args, const Part& part, const RowTile& rows,
                                      int row, Real m, Real l, bool merged = false)
        : is_part(part.count > 1 && !merged) {
        const ForwardArguments& arrays = args.arrays;
        Real rescale = 1;
        if (is_part) {
            const i64 index = part.slot(part.index) * BLOCK_Q + row;
            part_out = static_cast<Real*>(args.split_out) + index * arrays.shape.head_dim_v;
            part_lse = static_cast<Real*>(args.split_lse) + index * PART_NUMBERS;
        } else {
            out = static_cast<Element*>(arrays.out) + rows.offset(arrays.out_stride, row);
            lse = static_cast<Real*>(arrays.lse);
            if (lse != nullptr) lse += rows.lse_index(args, row);
            if constexpr (MAX_SCORE)
                max_score = max_scores<Real>(args) + rows.lse_index(args, row);
            if constexpr (SINK) {
                const WithSink<Real> with_sink(m, l, sink_of<Real>(args, rows.head_of(row)));
                m = with_sink.top;
                l = with_sink.sum;
                rescale = with_sink.rescale;
            }
        }
        row_lse = lse_of_row(m, l);
        inverse = l == 0 ? Real(0) : rescale / l;
    }

    __device__ __forceinline__ void store_lse() const {
        if (is_part) *part_lse = row_lse;
        else if (lse != nullptr) *lse = row_lse;
    }
    // m and l of the row's keys, in natural units.
    __device__ __forceinline__ void store_max_score(Real m, Real l) const {
        if constexpr (MAX_SCORE) *(is_part ? part_lse + 1 : max_score) = max_score_of_row(m, l);
    }
    // x: the sum of the column, relative to m.
    __device__ __forceinline__ void store(int column, Real x) const {
        if (is_part) part_out[column] = x * inverse;
        else out[column] = from_accumulator<Element>(x * inverse);
    }
    // The same of an even column and the next one, of a part's row of an even number of columns: so
    // rows begin at pairs.
    __device__ __forceinline__ void store_part(int column, Real x, Real y) const {
        struct alignas(2 * sizeof(Real)) Pair { Real x, y; };
        *reinterpret_cast<Pair*>(part_out + column) = {x * inverse, y * inverse};
    }
    // The same of any row, of head_dim_v columns.
    __device__ __forceinline__ void store_pair(
        int column, Real x, Real y, int head_dim_v) const {
        if (is_part && head_dim_v % 2 == 0) {
            if (column < head_dim_v) store_part(column, x, y);
        } else {
            if (column < head_dim_v) store(column, x);
            if (column + 1 < head_dim_v) store(column + 1, y);
        }
    }
};
