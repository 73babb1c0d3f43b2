// Gradients of a user's arrays (mod_arrays): sums of f_a dS over all pairs that read an element.
//
// Where a tile's pairs share elements, they are summed before global memory is: a lane adds up its
// own pairs (Sums of a head, of queries, of keys, of distances), then lanes of a warp theirs, in a
// fixed order, and one addition an element is left:
//
//     indices depend on         pairs of a warp that share an element
//     neither                   all
//     q_idx alone               those of a query
//     kv_idx alone              those of a key
//     q_idx - kv_idx alone      a diagonal
//     anything else             none: an addition each
//
// A kernel says which pairs a lane has by a LaneGrid. Additions to global memory are of floats, in
// any order, or exact (exact_sums.cuh).
#pragma once
#include "score/exact_sums.cuh"
#include "score/lane_grid.cuh"
#include "score/mod_arrays.cuh"

namespace ex {

// A gradient: sums of floats, contiguous, or ExactSums.
template <class Target, int AXES> struct ArrayGradient {
    Target sums;
    int size[AXES];
    i64 stride[AXES];
};

// Where an element lies. Outside there is nothing to add to.
template <class Target, int AXES, class... Index>
inline Place place(const ArrayGradient<Target, AXES>& to, Index... index) {
    const i64 indices[] = {static_cast<i64>(index)...};
    Place found{0, true};
    #pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        const i64 here = indices[axis] + (indices[axis] < 0 ? to.size[axis] : 0);
        found.inside &= static_cast<u64>(here) < static_cast<u64>(to.size[axis]);
        found.offset += here * to.stride[axis];
    }
    return found;
}

template <class Real> struct FloatSums {
    Real* data;
    template <class Arguments> static FloatSums of(const Arguments& args, int slot) {
        return {static_cast<Real*>(args.dmods[slot])};
    }
    void add(i64 element, Real x) const { atomicAdd(data + element, x); }
};

// gradient[index, ...] += x
template <class Target, int AXES, class Real, class... Index>
inline void scatter(const ArrayGradient<Target, AXES>& to, Real x, Index... index) {
    if (x == Real(0)) return;
    const Place at = place(to, index...);
    if (at.inside) to.sums.add(at.offset, x);
}

// The same, called by a whole warp. Where all lanes add to one element, as those of far distances
// do to a table's last, they add once.
template <class Target, int AXES, class Real, class... Index>
inline void scatter_by_warp(const ArrayGradient<Target, AXES>& to, Real x, Index... index) {
    const Place at = place(to, index...);
    const i64 own = at.inside ? at.offset : -1;
    if (__ballot_sync(0xFFFFFFFFu, own != __shfl_sync(0xFFFFFFFFu, own, 0)) == 0) {
        x = over_warp(x);
        if (threadIdx.x % 32 != 0) return;
    }
    if (x != Real(0) && at.inside) to.sums.add(at.offset, x);
}

// A lane's sums over its pairs of a tile. add(i, j, x): of query i and key j of its LaneGrid.
// finish(grid, add): by a whole warp; add(sum, query, key) of the sums over its lanes, which some
// lanes call with 0.

template <class Real, class Grid> struct HeadSum {
    Real sum = 0;
    void add(int, int, Real x) { sum += x; }
    template <class Add> void finish(const Grid& grid, Add add) {
        const Real all = over_warp(sum);
        if (threadIdx.x % 32 == 0) add(all, grid.query, grid.key);
    }
};

template <class Real, class Grid> struct QuerySums {
    Real sums[Grid::Queries::COUNT] = {};
    void add(int i, int, Real x) { sums[i] += x; }
    template <class Add> void finish(const Grid& grid, Add add) {
        share_sums<Grid::Keys::LANES>(
            sums, [](int lane, u32 bit) { return lane ^ bit; },
            [&](Real x, int i) { add(x, grid.query + Grid::Queries::offset(i), grid.key); });
    }
};

template <class Real, class Grid> struct KeySums {
    Real sums[Grid::Keys::COUNT] = {};
    void add(int, int j, Real x) { sums[j] += x; }
    template <class Add> void finish(const Grid& grid, Add add) {
        share_sums<Grid::Queries::LANES>(
            sums, [](int lane, u32 bit) { return lane ^ bit; },
            [&](Real x, int j) { add(x, grid.query, grid.key + Grid::Keys::offset(j)); });
    }
};

// Of the axes, A is that in which no positions are TOGETHER, B the other. With R the PERIOD of A and
// K R that of B, the distance of a lane's pair, counted from the warp's first, is
//
//     a - b = R m + (rank_a - TOGETHER rank_b - x),    m = i - K (j / TOGETHER),  x = j % TOGETHER
//
// A lane sums pairs of equal m and x. Let the bracket be R c + e with 0 <= e < R: sums move from m
// to m + c. Then lanes that have the same e have the same distances; a lane's e for x is that of
// another lane for x = 0.
template <class Real, class Grid> struct DistanceSums {
    static constexpr bool QUERIES_FIRST =
        Grid::Queries::TOGETHER == 1
        && (Grid::Keys::TOGETHER > 1 || Grid::Queries::PERIOD <= Grid::Keys::PERIOD);
    template <bool, class X, class Y> struct First { using type = X; };
    template <class X, class Y> struct First<false, X, Y> { using type = Y; };
    using A = typename First<QUERIES_FIRST, typename Grid::Queries, typename Grid::Keys>::type;
    using B = typename First<QUERIES_FIRST, typename Grid::Keys, typename Grid::Queries>::type;
    static constexpr int R = A::PERIOD, K = B::PERIOD / R, T = B::TOGETHER;
    static_assert(A::TOGETHER == 1 && B::PERIOD % R == 0, "a lane's pairs share distances");
    static constexpr int LEAST = -K * (B::COUNT / T - 1), MOST = A::COUNT - 1;    // m
    static constexpr int COUNT = MOST - LEAST + 1;

    Real sums[T][COUNT] = {};

    void add(int i, int j, Real x) {
        const int a = QUERIES_FIRST ? i : j, b = QUERIES_FIRST ? j : i;
        sums[b % T][a - K * (b / T) - LEAST] += x;
    }

    // A distance is passed as the query that precedes key 0 by it.
    template <class Add> void finish(const Grid& grid, Add add) {
        const int lane = threadIdx.x % 32, rank_a = A::rank(lane), rank_b = B::rank(lane);
        Real all[COUNT + K];                                // of m + c from LEAST - K on
        #pragma unroll
        for (int x = 0; x < T; ++x) {
            const int shift = -floor_of(rank_a - T * rank_b - x);
            const int source = A::lane_of((rank_a + x) % R) | (lane & B::LANES);
            #pragma unroll
            for (int n = 0; n < COUNT + K; ++n) {
                Real moved = 0;
                #pragma unroll
                for (int k = 0; k <= K; ++k)
                    if (n - K + k >= 0 && n - K + k < COUNT && shift == k)
                        moved = sums[x][n - K + k];
                if (x == 0) all[n] = moved;
                else all[n] += __shfl_sync(0xFFFFFFFFu, moved, source);
            }
        }
        const auto partner = [&](int, u32 bit) {
            const int other = lane ^ static_cast<int>(bit & B::LANES);
            const int rank = rank_a + T * (B::rank(other) - rank_b);
            return A::lane_of(static_cast<int>(static_cast<u32>(rank + R * 32) % R))
                | (other & static_cast<int>(B::LANES));
        };
        const int e = rank_a - T * rank_b - R * floor_of(rank_a - T * rank_b);
        const int first = grid.query - grid.key
            - (Grid::Queries::TOGETHER * Grid::Queries::rank(lane)
               - Grid::Keys::TOGETHER * Grid::Keys::rank(lane));
        share_sums<B::LANES>(all, partner, [&](Real x, int n) {
            const int distance = R * (n + LEAST - K) + e;
            add(x, first + (QUERIES_FIRST ? distance : -distance), 0);
        });
    }

    // Of a bracket, c. It is at least -K R.
    static int floor_of(int x) { return static_cast<int>(static_cast<u32>(x + K * R) / R) - K; }
};

}  // namespace ex
