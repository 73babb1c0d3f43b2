// The query tiles that see a block's keys, in the order in which backward kernels visit them.
//
// If DETERMINISTIC, key tiles add to a query tile's dQ in ascending order (dq_semaphore.cuh). Under
// a causal mask or WINDOW a key tile's first query tile is one that the key tiles before it reach
// later: it would wait for them. So each begins with its last query tile.
//
// IN_SECTIONS, under a causal mask: the last keys come first, which begin at query tiles that the
// other key tiles reach later. So key tiles that start together seldom wait for one another, but
// the longest come last. In the last section of heads (scheduler.cuh) the first keys come first,
// and each begins with its last query tile.
#pragma once
#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "score/pair_mask.cuh"

constexpr bool LAST_QUERIES_FIRST = DETERMINISTIC && (CAUSAL || WINDOW);

// IN_SECTIONS: whether the key tile begins with its last query tile; otherwise the last keys come
// first, and this counts key_tile.tile from the last one.
template <bool IN_SECTIONS, class Arguments>
__device__ __forceinline__ bool order_key_tile(
    const Arguments& args, int num_tiles, TileCoord& key_tile) {
    if (!IN_SECTIONS) return LAST_QUERIES_FIRST;
    const BackwardArguments& arrays = arrays_of(args);
    if (!before_last_section(key_tile, arrays.shape.num_heads_kv, arrays.schedule)) return true;
    key_tile.tile = num_tiles - 1 - key_tile.tile;
    return false;
}

// Called by whole warps.
template <bool IN_SECTIONS = false> struct QueryOrder {
    const PairMask& pair_mask;
    QueryTiles tiles;
    int k_tile, first;
    bool descends;                                          // order_key_tile()

    __device__ __forceinline__ QueryOrder(
        const PairMask& pair_mask, QueryTiles tiles, int k_tile,
        bool descends = LAST_QUERIES_FIRST)
        : pair_mask(pair_mask), tiles(tiles), k_tile(k_tile), descends(descends) {
        if (descends) first = after(tiles.end);
        else first = SKIPS_TILES ? after(tiles.first - 1) : tiles.first;
    }
    __device__ __forceinline__ int after(int tile) const {
        if (descends) return pair_mask.query_tile_before(tile, k_tile, tiles.first);
        return pair_mask.query_tile_after(tile, k_tile, tiles.end);
    }
    // Whether `tile`, the first or one after another, exists.
    __device__ __forceinline__ bool has(int tile) const {
        if constexpr (IN_SECTIONS) return descends ? tile >= tiles.first : tile < tiles.end;
        return LAST_QUERIES_FIRST ? tile >= tiles.first : tile < tiles.end;
    }
};

// The same for the query heads [first_head, end_head), one after another.
struct QueryWalk {
    QueryOrder<> order;
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
