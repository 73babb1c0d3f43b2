// What sm90/backward.cu has to know of a tile's queries besides Q and dO. prepare/query_rows.cu
// writes it, one tile after the other of each (batch, head); the TMA unit copies it with the tile's
// Q.
//
// Constants: BLOCK_Q, SEGMENTS.
#pragma once
#include "common/types.cuh"

// The segments of rows, if there are any.
template <bool HAS> struct IdsOfRows {
    void set_id(int, int) {}
    int id(int) const { return 0; }
};
template <> struct IdsOfRows<true> {
    int ids[BLOCK_Q];
    void set_id(int row, int id) { ids[row] = id; }
    int id(int row) const { return ids[row]; }
};

struct alignas(16) QueryRows : IdsOfRows<SEGMENTS> {
    float lse[BLOCK_Q];                         // times log2(e) or, if huge, as it was; inf: P = 0
    float delta[BLOCK_Q];                       // rowsum(dO * O)
    int huge;
    float scale;                                // of the scores: the call's, 1 if not LINEAR
    int q_start, head;                          // of the tile
};

// P = 2^(c S - lse log2 e) takes the product unrounded, lse log2 e rounded: up to this limit that
// is at most 2^-14 in the exponent. Beyond it weight() is taken, which is exact where S is.
constexpr float LARGEST_FUSED_LSE = 1024.0f;
