// A block's tile of queries, in kernels whose blocks each take one.
//
// Constants: BLOCK_Q, PACKED.
#pragma once
#include "common/packed_sequences.cuh"
#include "common/ptx.cuh"
#include "common/scheduler.cuh"

// The last tiles, which see the most keys, come first. blocks_of_tile consecutive blocks have the
// same one. ANEW: computed in the prologue and again in the epilogue, to hold no registers in
// between; that costs a few divisions.
template <bool ANEW, class Arguments>
__device__ __forceinline__ TileCoord query_tile_of_block(
    const Arguments& args, int blocks_of_tile = 1) {
    const Shape& shape = arrays_of(args).shape;
    const int num_tiles = num_query_tiles(args, BLOCK_Q);
    const u32 block = ANEW ? opaque(blockIdx.x) : blockIdx.x;
    TileCoord coord = tile_of_block(
        block / blocks_of_tile, num_tiles, shape.num_heads_q, shape.batch,
        arrays_of(args).schedule);
    coord.tile = num_tiles - 1 - coord.tile;
    return coord;
}
