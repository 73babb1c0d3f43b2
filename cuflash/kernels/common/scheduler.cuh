// Which tile of which head a block takes. The grid is one-dimensional: blockIdx.x counts tiles of
// all (batch, head) pairs, section by section. A section is heads_per_section pairs, as many as
// have what their blocks read in L2 at once. Within it come first the pairs' tiles 0, then their
// tiles 1, and so on: where tiles differ in length, a kernel numbers the longest first.
#pragma once
#include "common/types.cuh"

struct TileCoord { int tile, head, batch; };

inline TileCoord tile_of_block(
    int block, int num_tiles, int num_heads, int batch, Schedule schedule) {
    const int section_blocks = schedule.heads_per_section * num_tiles;
    const int section = block / section_blocks, rest = block % section_blocks;
    const int first_pair = section * schedule.heads_per_section;
    const int pairs = min(schedule.heads_per_section, batch * num_heads - first_pair);
    const int pair = first_pair + rest % pairs;
    return {rest / pairs, pair % num_heads, pair / num_heads};
}

// The same where an order was found in which tiles of all batches are taken: their numbers, batch
// by batch. Sections are of heads, and the first tile of the order comes first of each of them.
inline TileCoord tile_in_order(
    int block, const int* order, int num_tiles, int num_heads, int batch, Schedule schedule) {
    const TileCoord where = tile_of_block(block, batch * num_tiles, num_heads, 1, schedule);
    const int number = order[where.tile];
    return {number % num_tiles, where.head, number / num_tiles};
}

// The tiles of a block that takes one after another: items i, i + gridDim.x, ... of all. All blocks
// go through the heads together, so that few of them are at work at once and their keys stay in L2.
//
// A pair is a head's longest tile and its shortest, its second longest and its second shortest, and
// so on: where tile i is longer than tile i - 1 by always as much, all pairs take as long. After
// them come the single tiles, as those of odd numbers' middles.
struct StaticScheduler {
    const StaticSchedule& work_items;
    int num_heads;
    int half_item = 2 * blockIdx.x;     // 2 i, then 2 i + 1, of pairs i; then 2 i of single tiles i

    // The next tile, or a tile of -1 after the last.
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

// The same where most of a head's tiles take as long, as under a window with a right bound: all
// but the first `shorter` ones, of which each takes longer than the one before. Those of all heads
// come first, head by head, then the shorter ones, longest first, section by section. Each round
// of items goes to the blocks in the reverse order of the round before, so that who got more gets
// less: the longest block then works for 2 % longer than the mean, with pairs as above for 5 to 8
// %. (With a left bound alone tiles get shorter instead: the longest come last.)
struct BalancedScheduler {
    const StaticSchedule& work_items;                   // without pairs
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
