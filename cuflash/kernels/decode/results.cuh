// What a decode kernel leaves: O and lse of a row tile, or of a part of its keys, to be merged.
//
// Constants: Element, SINK.
#pragma once
#include "common/elements.cuh"
#include "decode/merge.cuh"
#include "decode/row_tile.cuh"
#include "score/sink.cuh"

// Where a row goes that has maximum m and sum l. A part's row is stored without the sink.
template <class Real> struct Result {
    Element* out;                                           // of the whole row
    Real *lse, *part_out, *part_lse;
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
            part_lse = static_cast<Real*>(args.split_lse) + index;
        } else {
            out = static_cast<Element*>(arrays.out) + rows.offset(arrays.out_stride, row);
            lse = static_cast<Real*>(arrays.lse);
            if (lse != nullptr) lse += rows.lse_index(args, row);
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
    // x: the sum of the column, relative to m.
    __device__ __forceinline__ void store(int column, Real x) const {
        if (is_part) part_out[column] = x * inverse;
        else out[column] = from_accumulator<Element>(x * inverse);
    }
};

// One row of the parts that the last block merges, 32 COLUMNS columns from first_column on.
template <class Real, int COLUMNS>
__device__ __forceinline__ void merge_columns(
    const Arguments& args, const Part& part, const RowTile& rows, int row, int first_column) {
    const Real* lse = static_cast<const Real*>(args.split_lse);
    const int head_dim_v = args.arrays.shape.head_dim_v, lane = threadIdx.x % 32;
    MergedRow<Real, COLUMNS> merged;
    for (int first = 0; first < part.count; first += 32) {
        const int parts = min(part.count - first, 32);
        merged.add(
            parts,
            lane < parts ? lse[part.slot(first + lane) * BLOCK_Q + row] : -Real(infinity()),
            [&](int p, int i) {
                const i64 index = part.slot(first + p) * BLOCK_Q + row;
                const Real* out = static_cast<const Real*>(args.split_out) + index * head_dim_v;
                const int column = first_column + i * 32 + lane;
                return column < head_dim_v ? out[column] : Real(0);
            });
    }
    const Result<Real> result(args, part, rows, row, merged.m, merged.sum, true);
    if (first_column + lane == 0) result.store_lse();
    #pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const int column = first_column + i * 32 + lane;
        if (column < head_dim_v) result.store(column, merged.out[i]);
    }
}

// Before a part is stored; best while its first keys come. Called by the whole block.
__device__ __forceinline__ void start_part(const Arguments& args, const Part& part) {
    if (part.count > 1 && threadIdx.x == 0) PartCounter(args, part).start();
}

// After a part is stored: merges all parts of its row tile, a warp a row, if it is the last. Called
// by the whole block; `shared` is in shared memory.
template <class Real>
__device__ __forceinline__ void finish_part(
    const Arguments& args, const Part& part, const RowTile& rows, u32& shared) {
    constexpr int COLUMNS = sizeof(Real) == 4 ? 4 : 2;      // as many as registers hold
    if (part.count == 1) return;
    if (!PartCounter(args, part).is_last_of(part.count, shared)) return;
    for (int row = threadIdx.x / 32; row < BLOCK_Q && rows.exists(row); row += NUM_WARPS)
        for (int column = 0; column < args.arrays.shape.head_dim_v; column += 32 * COLUMNS)
            merge_columns<Real, COLUMNS>(args, part, rows, row, column);
}
