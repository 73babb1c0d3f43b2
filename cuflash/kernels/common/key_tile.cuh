// A block's tile of keys, in kernels whose blocks each take one.
#pragma once
#include "common/dq_semaphore.cuh"
#include "common/scheduler.cuh"

// The tile, one of num_tiles of each key head. If DETERMINISTIC, blocks take tiles in the order in
// which they start. `shared_bytes`: as for block_ticket(). Whole block.
template <class Arguments>
__device__ __forceinline__ TileCoord key_tile_of_block(
    const Arguments& args, int num_tiles, void* shared_bytes) {
    const BackwardArguments& arrays = arrays_of(args);
    return tile_of_block(
        block_ticket(arrays.tile_counter, shared_bytes), num_tiles, arrays.shape.num_heads_kv,
        arrays.shape.batch, arrays.schedule);
}
