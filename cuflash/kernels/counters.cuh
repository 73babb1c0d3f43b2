// The integers in global memory by which the blocks of backward_wgmma.cu know of one another, one
// array: how many key tiles were handed out besides each block's first; of each key tile whether
// its dK and dV are doubtful; TURNS of each query tile, whose turn it is to add to its dQ.
// backward_rows.cu zeroes them.
//
// Constants: BLOCK_K, TURNS.
#pragma once
#include "scheduler.cuh"

__device__ __forceinline__ int num_key_tiles(const Shape& shape) {
    return (shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
}

__device__ __forceinline__ int* tiles_handed_out(const BackwardArguments& arguments) {
    return static_cast<int*>(arguments.turns);
}

__device__ __forceinline__ int* doubtful_key_tile(
    const BackwardArguments& arguments, TileOfHead where) {
    const Shape& shape = arguments.shape;
    return static_cast<int*>(arguments.turns) + 1
         + (where.batch * shape.num_heads_kv + where.head) * num_key_tiles(shape) + where.tile;
}

// `number` counts the query tiles of all heads.
__device__ __forceinline__ int* turns_of_query_tile(
    const BackwardArguments& arguments, int number) {
    return doubtful_key_tile(arguments, {0, 0, arguments.shape.batch}) + number * TURNS;
}
