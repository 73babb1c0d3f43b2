// The flags and semaphores in global memory that the blocks of sm90/backward.cu and
// backward_wide.cu share: recompute_flags and dq_semaphores. prepare/row_stats.cu zeroes them, and
// tile_counter, the third such array: one int, from which blocks take the index of their next key
// tile (next_index() in backward_scheduler.cuh).
#pragma once
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"

// The flag of a key tile: 1 if its dK or dV has a NaN or an infinity, so that finish/dq.cu examines
// its rows. Packed sequences number key tiles by slots.
__device__ __forceinline__ int* recompute_flag(const Arguments& args, TileCoord key_tile) {
    const Shape& shape = arrays_of(args).shape;
    return arrays_of(args).recompute_flags
         + (key_tile.batch * shape.num_heads_kv + key_tile.head) * num_key_tiles(args, BLOCK_K)
         + key_tile.tile;
}

// The DQ_SEMAPHORES of a query tile, one for each part of its dQ. Each holds the rank of the key
// tile that may add next. query_tile: an index among the query tiles of all heads.
__device__ __forceinline__ int* dq_semaphores(const Arguments& args, int query_tile) {
    return arrays_of(args).dq_semaphores + query_tile * DQ_SEMAPHORES;
}
