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

// The last block of a row tile merges its parts, a thread an element of O. Each thread has the
// loads of several parts under way: they are in L2.
template <class Real>
__device__ __forceinline__ void merge_parts(
    const Arguments& args, const Part& part, const RowTile& rows) {
    const int head_dim_v = args.arrays.shape.head_dim_v;
    for (int i = threadIdx.x; i < BLOCK_Q * head_dim_v; i += NUM_WARPS * 32) {
        const int row = i / head_dim_v, column = i % head_dim_v;
        if (!rows.exists(row)) return;
        const Real* out = static_cast<const Real*>(args.split_out);
        const Real* lse = static_cast<const Real*>(args.split_lse);
        MergedColumn<Real> merged;
        #pragma unroll 8
        for (int p = 0; p < part.count; ++p) {
            const i64 index = part.slot(p) * BLOCK_Q + row;
            merged.add(lse[index], out[index * head_dim_v + column]);
        }
        const Result<Real> result(args, part, rows, row, merged.m, merged.sum, true);
        if (column == 0) result.store_lse();
        result.store(column, merged.out);
    }
}

// After a part is stored: merges all parts of its row tile if it is the last. Called by the whole
// block; `shared` is in shared memory.
template <class Real>
__device__ __forceinline__ void finish_part(
    const Arguments& args, const Part& part, const RowTile& rows, u32& shared) {
    if (part.count == 1) return;
    u64* counter = args.part_counters + part.counter;
    if (is_last_to_arrive(counter, args.counter_key, part.count, shared))
        merge_parts<Real>(args, part, rows);
}
