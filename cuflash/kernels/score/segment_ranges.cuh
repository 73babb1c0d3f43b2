// The workspace of segment ids (SEGMENTS): what prepare/segment_ranges.cu and segment_order.cu
// compute and other kernels read.
//
//     IdRange  [batch][query tiles]       the ids of each query tile
//     IdRange  [batch][key tiles]         the ids of each key tile
//     int      segment_tile_counter       tiles that the dynamic scheduler has handed out
//     int      [items]                    sm90/forward.cu only: a block's previous tile
//                                         (tile_before, packed_sequences.cuh)
//     int      tile_order[]               the order in which blocks take the tiles of all batches
//
// Constants: BLOCK_Q, BLOCK_K.
#pragma once
#include "common/types.cuh"

// The smallest and the largest segment id of a tile's tokens; a tile has at least one.
struct IdRange { int low, high; };

inline bool disjoint(IdRange a, IdRange b) { return a.high < b.low || b.high < a.low; }

template <class Arguments>
inline IdRange query_tile_ids(const Arguments& args, int batch, int tile) {
    const int tiles = (arrays_of(args).shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    return static_cast<const IdRange*>(args.found)[i64(batch) * tiles + tile];
}
template <class Arguments> inline IdRange* key_tile_ids(const Arguments& args, int batch) {
    const Shape& shape = arrays_of(args).shape;
    const int q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    const int tiles = (shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
    return static_cast<IdRange*>(args.found)
         + (i64(shape.batch) * q_tiles + i64(batch) * tiles);
}

template <class Arguments> inline int* segment_tile_counter(const Arguments& args) {
    return reinterpret_cast<int*>(key_tile_ids(args, arrays_of(args).shape.batch));
}

inline int ints_after_counter(const ForwardWgmmaOptionsArguments& args) {
    return args.work_items.items;
}
inline int ints_after_counter(const BackwardWgmmaOptionsArguments&) { return 0; }
template <class Arguments> inline int* tile_order(const Arguments& args) {
    return segment_tile_counter(args) + 1 + ints_after_counter(args);
}
