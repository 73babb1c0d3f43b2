// The range of segment ids of each query tile and key tile (SEGMENTS), batch by batch.
// prepare/segment_ranges.cu computes them.
#pragma once
#include "common/constants.cuh"

inline bool disjoint(IdRange a, IdRange b) { return a.high < b.low || b.high < a.low; }

template <class Arguments>
inline IdRange query_tile_ids(const Arguments& args, int batch, int tile) {
    const int tiles = (arrays_of(args).shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    return args.query_tile_ids[i64(batch) * tiles + tile];
}
template <class Arguments>
inline IdRange key_tile_ids(const Arguments& args, int batch, int tile) {
    const int tiles = (arrays_of(args).shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
    return args.key_tile_ids[i64(batch) * tiles + tile];
}
