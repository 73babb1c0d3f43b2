// Which pairs of a tile a lane has: those of some queries with some keys.
#pragma once
#include "common/elements.cuh"

// One axis of a warp's pairs, its queries or keys. Counted from the warp's first, a lane's i-th is
//
//     PERIOD (i / TOGETHER) + TOGETHER rank + i % TOGETHER
//
// where the lane's bits LANES make its rank.
template <int COUNT_, int TOGETHER_, int PERIOD_, u32 LANES_> struct LaneAxis {
    static constexpr int COUNT = COUNT_, TOGETHER = TOGETHER_, PERIOD = PERIOD_;
    static constexpr u32 LANES = LANES_;
    static_assert(COUNT % TOGETHER == 0, "a lane has all that are together");

    // From the lane's first.
    static constexpr int offset(int i) { return i / TOGETHER * PERIOD + i % TOGETHER; }
    static int rank(int lane) {
        int found = 0, count = 0;
        #pragma unroll
        for (int bit = 0; bit < 5; ++bit)
            if (LANES >> bit & 1) found |= (lane >> bit & 1) << count++;
        return found;
    }
    // The bits of the lanes that have a rank.
    static int lane_of(int rank) {
        int found = 0, count = 0;
        #pragma unroll
        for (int bit = 0; bit < 5; ++bit)
            if (LANES >> bit & 1) found |= (rank >> count++ & 1) << bit;
        return found;
    }
};

template <class Queries_, class Keys_> struct LaneGrid {
    using Queries = Queries_;
    using Keys = Keys_;
    int query, key;                                         // the lane's first
};

// Of a fragment C of mma, or of several: rows are queries. A lane has ROWS and COLUMNS of them.
template <int ROWS, int COLUMNS>
using FragmentGrid = LaneGrid<LaneAxis<ROWS, 1, 8, 0x1C>, LaneAxis<COLUMNS, 2, 8, 0x03>>;

namespace ex {

// A sum over a warp, in every lane.
template <class Real> inline Real over_warp(Real x) {
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    return x;
}

// Sums of x over lanes that differ in the bits LANES, shared out among these: use(sum, i) for each
// index that a lane is left with, and for some past the end, of a sum 0. partner(lane, bit): the
// lane that has the other half for this bit. Whole warp.
template <u32 LANES, int FIRST_STEP = 1, class Real, int N, class Partner, class Use>
inline void share_sums(const Real (&x)[N], Partner partner, Use use, int first = 0) {
    if constexpr (LANES == 0) {
        #pragma unroll
        for (int n = 0; n < N; ++n) use(x[n], first + n * FIRST_STEP);
    } else {
        constexpr u32 BIT = LANES & -LANES;
        const int lane = threadIdx.x % 32, other = partner(lane, BIT);
        const bool odd = (lane & BIT) != 0;
        Real half[(N + 1) / 2];
        #pragma unroll
        for (int n = 0; n < (N + 1) / 2; ++n) {
            const Real even_part = x[2 * n];
            const Real odd_part = 2 * n + 1 < N ? x[2 * n + 1 < N ? 2 * n + 1 : 0] : Real(0);
            half[n] = (odd ? odd_part : even_part)
                + __shfl_sync(0xFFFFFFFFu, odd ? even_part : odd_part, other);
        }
        share_sums<LANES & ~BIT, FIRST_STEP * 2>(half, partner, use, first + odd * FIRST_STEP);
    }
}

}  // namespace ex
