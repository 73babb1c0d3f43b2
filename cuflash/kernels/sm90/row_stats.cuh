// Row statistics of a query tile, lse and delta, for sm90/backward.cu and backward_wide.cu.
// prepare/row_stats.cu writes one QueryRows for each tile of each (batch, head), one after
// another; the producer copies it in bulk together with the tile's Q.
#pragma once
#include "common/ptx.cuh"
#include "score/lse_rest.cuh"

// Segment ids of the rows, if there are any.
template <bool> struct RowSegmentIds {
    void set_id(int, int) {}
    int id(int) const { return 0; }
};
template <> struct RowSegmentIds<true> {
    int ids[BLOCK_Q];
    void set_id(int row, int id) { ids[row] = id; }
    int id(int row) const { return ids[row]; }
};

// The grids of the rows' dQ, bits of a DqGrid (integer_dq.cuh), if its sums are integers.
template <bool> struct RowGrids {
    void set_grid(int, u32) {}
    u32 grid(int) const { return 0; }
};
template <> struct RowGrids<true> {
    u32 grids[BLOCK_Q];
    void set_grid(int row, u32 bits) { grids[row] = bits; }
    u32 grid(int row) const { return grids[row]; }
};

// The rests of the rows, if they may have any (lse_rest.cuh); 0 of those without one.
template <bool> struct RowRests {
    void set_rest(int, float) {}
    u32 rests_address() const { return 0; }
};
template <> struct RowRests<true> {
    float rests[BLOCK_Q];
    void set_rest(int row, float rest) { rests[row] = rest; }
    u32 rests_address() const { return shared_address(rests); }
};

struct alignas(16) QueryRows
    : RowRests<HAS_LSE_RESTS>, RowSegmentIds<SEGMENTS>, RowGrids<INTEGER_DQ> {
    float lse[BLOCK_Q];                         // lse log2(e), or lse if has_large_lse; inf: P = 0
    float delta[BLOCK_Q];                       // rowsum(dO * O) - dlse
    int has_large_lse;                          // |lse log2(e)| > MAX_FUSED_LSE in some row
    float scale;                                // of the scores: the call's, 1 if not LINEAR
    int q_start, head;                          // of the tile
};

// P = 2^(scale_log2 S - lse log2 e) fuses the product, which is not rounded, with lse log2 e, which
// is. Up to this |lse log2 e| the rounding changes the exponent by 2^-14 at most. Tiles with a
// larger one use weight() or weight_beside() (softmax.cuh), which are exact where S is.
constexpr float MAX_FUSED_LSE = 1024.0f;
