// Parts of the last query tiles of forward.cu (KEY_PARTS), in full calls.
//
// Query tiles take equally long, and their number is seldom a multiple of that of blocks: in the
// last round some blocks would have a tile and others none. So the keys of those tiles are divided.
// The key tiles of all of them, one query tile after another, are cut into shares of equal length,
// one for each block. A share is not longer than a query tile, so it lies in one or in two.
//
//     query tile |    0    |    1    |    2    |      n key tiles each
//     share      |  0  |  1  |  2  |  3  |  4  |      s key tiles each
//
// A part, what a share has of a query tile, leaves its O, m and l in a slot of args.key_parts.
// forward_merge.cu merges the parts of each row.
#pragma once
#include "sm90/forward_work.cuh"

constexpr int LEAST_SHARE = 8;                              // key tiles: parts cost a few each
constexpr int SLOT_FLOATS = BLOCK_Q * (HEAD_DIM_V + 2);

struct RowPart { float max, sum; };                         // m, and l relative to it
struct alignas(8) ColumnPair { float x, y; };

// whole: tiles before those that are divided.
struct KeyShares {
    int key_tiles, whole, divided, share;
    // blocks: of forward.cu's grid.
    __device__ __forceinline__ KeyShares(const Arguments& args, int blocks)
        : key_tiles((args.arrays.shape.seqlen_k + BLOCK_K - 1) / BLOCK_K),
          whole(args.work_items.items / blocks * blocks), divided(args.work_items.items - whole),
          share(max((divided * key_tiles + blocks - 1) / blocks, LEAST_SHARE)) {}

    // The blocks that have parts of a divided tile.
    __device__ __forceinline__ int first_block(int tile) const { return tile * key_tiles / share; }
    __device__ __forceinline__ int last_block(int tile) const {
        return ((tile + 1) * key_tiles - 1) / share;
    }
};

// The slot of a block's part of a divided tile: after a part comes that of the next block, or of
// the next tile, but never of both.
__device__ __forceinline__ int slot_of_part(int block, int tile) { return block + tile; }
__device__ __forceinline__ float* memory_of_slot(const Arguments& args, int slot) {
    return static_cast<float*>(args.key_parts) + i64{slot} * SLOT_FLOATS;
}
__device__ __forceinline__ RowPart* rows_of_slot(float* slot) {
    return reinterpret_cast<RowPart*>(slot + BLOCK_Q * HEAD_DIM_V);
}

// The query tile of a work item: as StaticScheduler's single tiles.
__device__ __forceinline__ TileCoord coord_of_item(const Arguments& args, int item) {
    const int tiles = args.work_items.singles, heads = args.arrays.shape.num_heads_q;
    const int head = item / tiles;
    return {tiles - 1 - item % tiles, head % heads, head / heads};
}
