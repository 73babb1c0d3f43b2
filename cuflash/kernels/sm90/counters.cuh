// The integers in global memory by which the blocks of sm90/backward.cu know of one another, one
// array: how many key tiles were handed out, if not DETERMINISTIC besides each block's first; of
// each key tile whether its dK and dV are doubtful; TURNS of each query tile, whose turn it is to
// add to its dQ. prepare/query_rows.cu zeroes them.
//
// Constants: Arguments, PACKED, BLOCK_K, TURNS.
#pragma once
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"

__device__ __forceinline__ int* tiles_handed_out(const Arguments& args) {
    return static_cast<int*>(arrays_of(args).turns);
}

// Of packed sequences the tile's number is that of its slot.
__device__ __forceinline__ int* recompute_flag(const Arguments& args, TileCoord where) {
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    return static_cast<int*>(arguments.turns) + 1
         + (where.batch * shape.num_heads_kv + where.head) * num_key_tiles(args, BLOCK_K)
         + where.tile;
}

// `number` counts the query tiles of all heads.
__device__ __forceinline__ int* turns_of_query_tile(const Arguments& args, int number) {
    return recompute_flag(args, {0, 0, arrays_of(args).shape.batch}) + number * TURNS;
}
