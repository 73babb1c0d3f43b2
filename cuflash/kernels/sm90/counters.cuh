// The integers in global memory by which the blocks of sm90/backward.cu and backward_wide.cu
// coordinate, in one array that prepare/query_rows.cu zeroes:
//     the tile counter: how many key tiles were handed out, not counting each block's first unless
//         DETERMINISTIC;
//     for each key tile, whether its dK and dV need to be recomputed (finish/dq.cu);
//     for each query tile, TURNS semaphores: the turn of the key tile that may add to its dQ.
//
// Constants: Arguments, PACKED, BLOCK_K, TURNS.
#pragma once
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"

__device__ __forceinline__ int* tile_counter(const Arguments& args) {
    return static_cast<int*>(arrays_of(args).turns);
}

// Packed sequences count key tiles by slots.
__device__ __forceinline__ int* recompute_flag(const Arguments& args, TileCoord key_tile) {
    const Shape& shape = arrays_of(args).shape;
    return tile_counter(args) + 1
         + (key_tile.batch * shape.num_heads_kv + key_tile.head) * num_key_tiles(args, BLOCK_K)
         + key_tile.tile;
}

// query_tile: an index among the query tiles of all heads.
__device__ __forceinline__ int* dq_semaphores(const Arguments& args, int query_tile) {
    return recompute_flag(args, {0, 0, arrays_of(args).shape.batch}) + query_tile * TURNS;
}
