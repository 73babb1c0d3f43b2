// Tile schedulers: which tile of which head a block takes next.
//
// The grid is one-dimensional: blockIdx.x counts the tiles of all (batch, head) pairs, section by
// section. A section is heads_per_section pairs, as many as L2 can hold the inputs of. Within a
// section, tile 0 of each pair comes first, then tile 1 of each, and so on. If tiles differ in
// length, kernels number them longest first. All pairs from section last_section on are one
// section, which may be larger: tiles are shared out evenly if many short ones come last.
#pragma once
#include "common/types.cuh"

struct TileCoord { int tile, head, batch; };

inline TileCoord tile_of_block(
    int block, int num_tiles, int num_heads, int batch, Schedule schedule) {
    const int section_blocks = schedule.heads_per_section * num_tiles;
    const int section = min(block / section_blocks, schedule.last_section);
    const int rest = block - section * section_blocks;
    const int first_pair = section * schedule.heads_per_section;
    int pairs = batch * num_heads - first_pair;
    if (section < schedule.last_section) pairs = min(pairs, schedule.heads_per_section);
    const int pair = first_pair + rest % pairs;
    return {rest / pairs, pair % num_heads, pair / num_heads};
}

// The same for tiles of all batches in a given order (prepare/segment_order.cu): order[i] is
// batch * num_tiles + tile. A section is then heads_per_section heads, and starts with the first
// tile of the order for each of them.
inline TileCoord tile_in_order(
    int block, const int* order, int num_tiles, int num_heads, int batch, Schedule schedule) {
    const TileCoord where = tile_of_block(block, batch * num_tiles, num_heads, 1, schedule);
    const int number = order[where.tile];
    return {number % num_tiles, where.head, number / num_tiles};
}

// Whether a pair's section is not the last one.
inline bool before_last_section(TileCoord tile, int num_heads, Schedule schedule) {
    const int pair = tile.batch * num_heads + tile.head;
    return pair / schedule.heads_per_section < schedule.last_section;
}

// Static scheduler of persistent blocks: block b takes the work items b, b + gridDim.x, and so on.
// All blocks advance through the heads together, so few heads are processed at a time and their
// keys stay in L2.
//
// A work item is a pair of tiles or a single tile. A pair is a head's longest tile and its
// shortest, its second longest and its second shortest, and so on: where each tile is longer than
// the previous one by the same amount, all pairs take the same time. The single tiles, such as the
// middle tile of an odd number, come after all pairs.
struct StaticScheduler {
    const StaticSchedule& work_items;
    int num_heads;
    int half_item = 2 * blockIdx.x;     // 2 i and 2 i + 1: the tiles of pair i; 2 i: single tile i

    // The next tile; tile -1 after the last.
    __device__ __forceinline__ TileCoord next() {
        int item = half_item / 2, tile, head;
        if (item < work_items.paired_items) {
            const bool second = half_item % 2 != 0;
            head = item / work_items.pairs;
            tile = item % work_items.pairs;
            if (!second) tile = 2 * work_items.pairs + work_items.singles - 1 - tile;
            half_item += second ? 2 * gridDim.x - 1 : 1;
        } else if (item < work_items.items) {
            item -= work_items.paired_items;
            head = item / work_items.singles;
            tile = work_items.pairs + work_items.singles - 1 - item % work_items.singles;
            half_item += 2 * gridDim.x;
        } else {
            return {-1, 0, 0};
        }
        return {tile, head % num_heads, head / num_heads};
    }
};

// Static scheduler with a tail. In a last round of pairs, blocks without one would be idle for as
// long as a pair takes. Instead, some blocks are persistent and have as many pairs each, and each
// other block has one of the tiles that are left, longest first: the GPU starts it where an SM is
// free.
struct TailScheduler {
    const StaticSchedule& work_items;       // items: paired_items, then the tiles of the tail
    int num_heads, half_item = 2 * blockIdx.x;

    // The next tile; tile -1 after the last.
    __device__ __forceinline__ TileCoord next() {
        const int tail = work_items.items - work_items.paired_items;
        const int persistent = gridDim.x - tail, item = half_item / 2;
        int tile = -1, head = 0;
        if (static_cast<int>(blockIdx.x) >= persistent) {
            find_in_tail(item - persistent, tail, tile, head);
            half_item = 2 * gridDim.x;                      // past the tail
        } else if (item < work_items.paired_items) {
            const bool second = half_item % 2 != 0;
            head = item / work_items.pairs;
            tile = item % work_items.pairs;
            if (!second) tile = 2 * work_items.pairs + work_items.singles - 1 - tile;
            half_item += second ? 2 * persistent - 1 : 1;
        }
        return {tile, head % num_heads, head / num_heads};
    }
    // Pairs lead from a head's outermost tiles to its middle. So there are five ranges of tiles,
    // each of all heads from some head on: the persistent blocks have `cut` pairs of head `split`,
    // all pairs of heads before it, and no middle tile.
    __device__ __forceinline__ void find_in_tail(
        int item, int tail, int& tile, int& head) const {
        const int pairs = work_items.pairs, singles = work_items.singles;
        const int split = work_items.paired_items / pairs, cut = work_items.paired_items % pairs;
        const int heads = (2 * work_items.paired_items + tail) / (2 * pairs + singles);
        int end = 2 * pairs + singles;
        for (int range = 0; range < 5; ++range) {
            const bool is_outer = range % 4 == 0, is_middle = range == 2;
            const int tiles = is_outer ? cut : is_middle ? singles : pairs - cut;
            const int first = is_outer ? split + 1 : is_middle ? 0 : split;
            const int count = tiles * (heads - first);
            if (item < count) {
                tile = end - 1 - item / (heads - first);
                head = first + item % (heads - first);
                return;
            }
            item -= count;
            end -= tiles;
        }
    }
};

// Static scheduler for heads most of whose tiles take the same time, as under a window with a right
// bound: all but the first `shorter` tiles, each of which takes longer than the previous one. The
// equal tiles of all heads come first, head by head, then the shorter ones, longest first, section
// by section. Each round of items goes to the blocks in the reverse order of the previous round, so
// a block that got more gets less. The slowest block then works 2 % longer than the mean; with
// pairs, as above, 5 to 8 % longer. (With only a left bound the tiles get shorter instead: the
// longest come last.)
struct BalancedScheduler {
    const StaticSchedule& work_items;                   // single tiles only
    Schedule schedule;
    int num_heads, batch, shorter, round = 0;

    __device__ __forceinline__ TileCoord next() {
        const int block = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
        const int item = round * gridDim.x + block;
        ++round;
        if (item >= work_items.items) return {-1, 0, 0};
        const int even = work_items.singles - shorter, even_items = even * num_heads * batch;
        if (item < even_items) {
            const int head = item / even;
            return {work_items.singles - 1 - item % even, head % num_heads, head / num_heads};
        }
        TileCoord where = tile_of_block(item - even_items, shorter, num_heads, batch, schedule);
        where.tile = shorter - 1 - where.tile;
        return where;
    }
};
