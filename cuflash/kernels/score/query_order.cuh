// The query tiles that see a block's keys, in the order in which backward kernels visit them.
//
// If DETERMINISTIC, key tiles add to a query tile's dQ in ascending order (dq_semaphore.cuh). Under
// a causal mask or WINDOW a key tile's first query tile is one that the key tiles before it reach
// later: it would wait for them. So each begins with its last query tile.
#pragma once
#include "common/mask.cuh"
#include "score/pair_mask.cuh"

constexpr bool LAST_QUERIES_FIRST = DETERMINISTIC && (CAUSAL || WINDOW);

// Called by whole warps.
struct QueryOrder {
    const PairMask& pair_mask;
    QueryTiles tiles;
    int k_tile, first;

    __device__ __forceinline__ QueryOrder(const PairMask& pair_mask, QueryTiles tiles, int k_tile)
        : pair_mask(pair_mask), tiles(tiles), k_tile(k_tile) {
        if constexpr (LAST_QUERIES_FIRST) first = after(tiles.end);
        else first = SKIPS_TILES ? after(tiles.first - 1) : tiles.first;
    }
    __device__ __forceinline__ int after(int tile) const {
        if constexpr (LAST_QUERIES_FIRST)
            return pair_mask.query_tile_before(tile, k_tile, tiles.first);
        else
            return pair_mask.query_tile_after(tile, k_tile, tiles.end);
    }
    // Whether `tile`, the first or one after another, exists.
    __device__ __forceinline__ bool has(int tile) const {
        return LAST_QUERIES_FIRST ? tile >= tiles.first : tile < tiles.end;
    }
};

// The same for the query heads [first_head, end_head), one after another.
struct QueryWalk {
    QueryOrder order;
    int first_head, end_head;

    struct Place { int head, tile; };
    __device__ __forceinline__ Place first() const {
        return {order.has(order.first) ? first_head : end_head, order.first};
    }
    __device__ __forceinline__ Place after(Place at) const {
        const int tile = order.after(at.tile);
        return order.has(tile) ? Place{at.head, tile} : Place{at.head + 1, order.first};
    }
    __device__ __forceinline__ bool has(Place at) const { return at.head < end_head; }
};
