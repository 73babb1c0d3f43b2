// Which pairs of a tile a thread has where THREADS of them share a query: KEYS of its row, THREADS
// apart. A warp has several queries where as many threads as a power of two share one. Otherwise a
// thread sums for itself.
#pragma once
#include "score/lane_grid.cuh"

template <int THREADS, int KEYS> struct RowPairsOf {
    static constexpr bool SHARED_SUMS = THREADS == 4 || THREADS == 8;
    static constexpr u32 KEY_LANES = SHARED_SUMS ? THREADS - 1 : 0;
    using type = LaneGrid<
        LaneAxis<1, 1, SHARED_SUMS ? 32 / THREADS : THREADS, SHARED_SUMS ? 31 & ~KEY_LANES : 0>,
        LaneAxis<KEYS, 1, THREADS, KEY_LANES>>;
};
template <int THREADS, int KEYS> using RowPairs = typename RowPairsOf<THREADS, KEYS>::type;
