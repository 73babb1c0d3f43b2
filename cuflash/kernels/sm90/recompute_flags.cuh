// The flags of key tiles in global memory that sm90/backward.cu and backward_wide.cu leave for
// finish/dq.cu. prepare/row_stats.cu zeroes them, and tile_counter: one int, from which blocks take
// the index of their next key tile (next_index() in backward_scheduler.cuh).
//
// Constants: Arguments, PACKED, BLOCK_K.
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
