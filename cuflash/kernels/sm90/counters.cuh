// The flags and semaphores in global memory by which the blocks of sm90/backward.cu and
// backward_wide.cu coordinate. prepare/query_rows.cu zeroes them, and tile_counter: how many key
// tiles were handed out, not counting each block's first unless DETERMINISTIC.
//
// Constants: Arguments, PACKED, BLOCK_K, DQ_SEMAPHORES.
#pragma once
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"

// Whether dK and dV of a key tile need to be recomputed (finish/dq.cu). Packed sequences count key
// tiles by slots.
__device__ __forceinline__ int* recompute_flag(const Arguments& args, TileCoord key_tile) {
    const Shape& shape = arrays_of(args).shape;
    return arrays_of(args).recompute_flags
         + (key_tile.batch * shape.num_heads_kv + key_tile.head) * num_key_tiles(args, BLOCK_K)
         + key_tile.tile;
}

// The DQ_SEMAPHORES of a query tile, each the turn of the key tile that may add to a part of its
// dQ. query_tile: an index among the query tiles of all heads.
__device__ __forceinline__ int* dq_semaphores(const Arguments& args, int query_tile) {
    return arrays_of(args).dq_semaphores + query_tile * DQ_SEMAPHORES;
}
