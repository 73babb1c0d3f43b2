// Parts of dQ as integers (INTEGER_DQ, integer_dq.cuh), from the consumers of sm90/backward.cu and
// backward_wide.cu. Without INTEGER_DQ nothing here compiles to anything.
//
// A warp has 16 rows of dQ, and lane l parts of the rows l / 4 and l / 4 + 8. Where dQ is staged an
// iteration later, it keeps the grid of row l % 16, one register.
#pragma once
#include "common/dq_accum.cuh"
#include "sm90/backward_scheduler.cuh"
#include "sm90/integer_dq.cuh"

// By writer warps: whether the consumers stage two limbs of a query tile. These know it from its
// grids.
__device__ __forceinline__ bool is_wide(const Arguments& args, int query_tile) {
    const QueryRows* rows = static_cast<const QueryRows*>(args.arrays.delta) + query_tile;
    return INTEGER_DQ && DqGrid{rows->grid(0)}.is_wide();
}

// The bits of the grid of row lane % 16 of a warp's rows. thread: of those that compute dQ.
__device__ __forceinline__ u32 lane_grid_of(const QueryRows& rows, int thread) {
    return rows.grid(thread / 32 % SCORE_WARPS_Q * 16 + thread % 16);
}

// The grids of a lane's two rows.
struct RowPair {
    DqGrid first, second;
    __device__ __forceinline__ RowPair(u32 lane_grid, int lane)
        : first{INTEGER_DQ ? __shfl_sync(WHOLE_WARP, lane_grid, lane / 4) : 0},
          second{INTEGER_DQ ? __shfl_sync(WHOLE_WARP, lane_grid, lane / 4 + 8) : 0} {}
    // thread: of those that compute dQ.
    __device__ __forceinline__ RowPair(const QueryRows& rows, int thread)
        : first{rows.grid(thread / 32 % SCORE_WARPS_Q * 16 + thread % 32 / 4)},
          second{rows.grid(thread / 32 % SCORE_WARPS_Q * 16 + thread % 32 / 4 + 8)} {}
    bool are_wide() const { return first.is_wide(); }       // both, and those of other lanes
};

// Limb i of a thread's part of dQ: a C fragment has two elements of the first row, then two of the
// second.
template <bool IS_LOW, int COUNT>
__device__ __forceinline__ int dq_limb(
    const float (&dq)[COUNT], int i, float first_steps, float second_steps) {
    const float steps = i / 2 % 2 == 0 ? first_steps : second_steps;
    return IS_LOW ? low_limb(dq[i], steps) : high_limb(dq[i], steps);
}

// Stores a limb of a thread's part of dQ to shared memory.
template <bool IS_LOW, int COUNT>
__device__ __forceinline__ void stage_limb(
    u32 target, const float (&dq)[COUNT], const RowPair& grids) {
    const float first = grids.first.steps(), second = grids.second.steps();
    const auto bits = [&](int i) {
        return __int_as_float(dq_limb<IS_LOW>(dq, i, first, second));
    };
    #pragma unroll
    for (int n = 0; n < COUNT / 4; ++n)
        store_shared_16(target + dq_sum_step(0, n) * 4, bits(n * 4), bits(n * 4 + 1),
                        bits(n * 4 + 2), bits(n * 4 + 3));
}

// Adds a limb of a thread's part of dQ to sums in global memory, BY_LANES, of which `sums` is the
// lane's first.
template <bool IS_LOW, int COUNT>
__device__ __forceinline__ void add_limb(
    int* sums, const float (&dq)[COUNT], const RowPair& grids) {
    const float first = grids.first.steps(), second = grids.second.steps();
    #pragma unroll
    for (int i = 0; i < COUNT; ++i)
        reduce_add_s32(sums + dq_sum_step(0, i / 4) + i % 4 * 32,
                       dq_limb<IS_LOW>(dq, i, first, second));
}

// Whether a pair of float16 has a NaN or an infinity: an exponent of ones.
__device__ __forceinline__ bool has_nonfinite_half(u32 pair) {
    return (pair & 0x7C00u) == 0x7C00u || (pair & 0x7C000000u) == 0x7C000000u;
}

// Where rounded dS^T has a NaN or an infinity, rows lose their grid: dQ's integers cannot tell. In
// global memory, where others read the grid meanwhile: to them the row's parts count as 0 or not,
// and finish/dq.cu discards their sum. float16 alone may overflow while the row's bound is finite.
__device__ __forceinline__ void drop_overflowing_rows(
    const Arguments& args, const WorkTile& work, const QueryRows& rows, const u32 (&ds)[S_REGS / 2],
    int first_column) {
    if (!FLOAT16_DQ || !DqGrid{rows.grid(0)}.may_overflow()) return;
    QueryRows& kept = static_cast<QueryRows*>(args.arrays.delta)[query_tile_index(
        args, sequence_of(work), work.batch, rows.head, rows.q_start / BLOCK_Q)];
    #pragma unroll
    for (int i = 0; i < S_REGS / 2; ++i) {                  // a pair of queries each
        if (!has_nonfinite_half(ds[i])) continue;
        #pragma unroll
        for (int row = first_column + i / 2 * 8, end = row + 2; row < end; ++row)
            kept.set_grid(row, kept.grid(row) & DqGrid::FLAGS);
    }
}
