// One number of each fixed row of a block's pairs: a sum or a maximum over the streamed columns.
#pragma once
#include "common/softmax.cuh"

// Reductions: `nothing` of no pair; `term` of a pair, which is that of query `query`; `of` two.
template <class Real> struct Sum {
    using Total = Real;
    static Total nothing() { return 0; }
    static Total term(Real x, int) { return x; }
    static Total of(Total a, Total b) { return a + b; }
    static Real value(Total x) { return x; }
};

// NaN is larger than any number.
template <class Real> struct Max {
    using Total = Real;
    static Total nothing() { return -Real(infinity()); }
    static Total term(Real x, int) { return x; }
    static Total of(Total a, Total b) { return b > a || b != b ? b : a; }
    static Real value(Total x) { return x == -Real(infinity()) ? Real(0) : x; }
};

// The same with the first query that has it, -1 if none has.
template <class Real> struct First {
    struct Total { Real value; int query; };
    static Total nothing() { return {-Real(infinity()), -1}; }
    static Total term(Real x, int query) { return {x, query}; }
    static Total of(Total a, Total b) {
        if (a.query < 0 || b.query < 0) return a.query < 0 ? b : a;
        const bool same = a.value == b.value || (a.value != a.value && b.value != b.value);
        if (same) return b.query < a.query ? b : a;
        return b.value > a.value || b.value != b.value ? b : a;
    }
    static Real value(Total x) { return x.query < 0 ? Real(0) : x.value; }
};

template <class Real, bool IS_MAX, bool FINDS_QUERY> struct ReduceChoice {
    using type = Sum<Real>;
};
template <class Real> struct ReduceChoice<Real, true, false> { using type = Max<Real>; };
template <class Real> struct ReduceChoice<Real, true, true> { using type = First<Real>; };

// What threads hold of their rows becomes the block's, in a fixed order: store(row, total).
// `tile`: shared memory that no thread reads any more once all are here. Whole block.
template <class Reduce, class Tiles, class Bytes, class Store>
inline void reduce_rows(
    const typename Reduce::Total (&totals)[Tiles::OWN_ROWS], Bytes& tile, Store store) {
    using Parts = typename Reduce::Total[Tiles::ROW_SHARERS][Tiles::NUM_ROWS];
    static_assert(sizeof(Parts) <= sizeof(tile), "the parts fit where a tile was");
    Parts& parts = reinterpret_cast<Parts&>(tile);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) parts[Tiles::sharer()][Tiles::row(i)] = totals[i];
    __syncthreads();
    for (int row = threadIdx.x; row < Tiles::NUM_ROWS; row += Tiles::NUM_THREADS_OF_BLOCK) {
        typename Reduce::Total all = parts[0][row];
        #pragma unroll
        for (int n = 1; n < Tiles::ROW_SHARERS; ++n) all = Reduce::of(all, parts[n][row]);
        store(row, all);
    }
}
