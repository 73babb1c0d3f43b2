// Which tile of which head a block of the kernels on CUDA cores computes: the heads of all batches
// in turn, each time with their next tile.
//
// Constants: CAUSAL, BLOCK_Q, BLOCK_K, PACKED; Arguments.
#pragma once
#include "common/packed_sequences.cuh"
#include "common/scheduler.cuh"

// Tiles of queries. If CAUSAL the last, which take longest, come first.
inline TileCoord query_tile_at(const Arguments& args, u32 index) {
    const Shape& shape = arrays_of(args).shape;
    const int head = index % shape.num_heads_q;
    const int batch = index / shape.num_heads_q % shape.batch;
    const int order = index / shape.num_heads_q / shape.batch;
    return {CAUSAL ? num_query_tiles(args, BLOCK_Q) - 1 - order : order, head, batch};
}

// Tiles of keys, of key heads.
inline TileCoord key_tile_at(const Arguments& args, u32 index) {
    const Shape& shape = arrays_of(args).shape;
    const int head = index % shape.num_heads_kv;
    const int batch = index / shape.num_heads_kv % shape.batch;
    const int tile = index / shape.num_heads_kv / shape.batch;
    return {tile, head, batch};
}
