// Tile schedulers of forward.cu and forward_wide.cu: which query tile a block computes next, and
// how many key tiles it visits. StaticTileScheduler computes the block's tiles from blockIdx;
// DynamicTileScheduler takes them from an atomic counter.
#pragma once
#include "common/scheduler.cuh"
#include "sm90/forward_key_parts.cuh"

// The key tiles of num_rows queries; at least one is visited.
__device__ __forceinline__ KeyTiles key_tiles(
    const Mask<CAUSAL, WINDOW>& mask, int first_row, int num_rows) {
    const KeyTiles tiles = mask.key_tiles(first_row, num_rows, BLOCK_K);
    return {tiles.num_full, max(tiles.num_visited, 1), tiles.first, tiles.first_full};
}

// The first key tile of queries from first_row on.
__device__ __forceinline__ int first_key_tile(const Mask<CAUSAL, WINDOW>& mask, int first_row) {
    return mask.first_key(first_row) / BLOCK_K;
}

template <class Sequence>
__device__ __forceinline__ Mask<CAUSAL, WINDOW> mask_of(
    const Arguments& args, const Sequence& sequence) {
    return {seqlen_q_of(args, sequence), seqlen_k_of(args, sequence), window_of<WINDOW>(args)};
}

// The query tile at `coord`. A head's rows may leave whole consumer warpgroups of one tile without
// rows. That is the tile whose queries see the fewest keys: the first under the causal mask,
// otherwise the last. With segment ids or the user's mask it is always the last, because what is
// known of whole tiles (id ranges, tile flags) is of tiles that start at query 0.
__device__ __forceinline__ QueryTile make_query_tile(
    TileCoord coord, const TileSequence& sequence, const Arguments& args) {
    if (coord.tile < 0) return {sequence, 0, 0, 0, 0};
    const int length = seqlen_q_of(args, sequence);
    const int groups = (length + CONSUMER_ROWS - 1) / CONSUMER_ROWS;
    const int missing_rows = CAUSAL && !SKIPS_TILES
        ? (CONSUMER_WARPGROUPS - 1 - (groups - 1) % CONSUMER_WARPGROUPS) * CONSUMER_ROWS : 0;
    const int first = coord.tile * BLOCK_Q - missing_rows, end = min(first + BLOCK_Q, length);
    return {sequence, max(first, 0), end - max(first, 0), coord.head, coord.batch};
}

template <class Scheduler>
__device__ __forceinline__ WholeTile next_work_tile(Scheduler& scheduler, const Arguments& args) {
    const QueryTile tile = scheduler.next(args);
    const Mask<CAUSAL, WINDOW> mask = mask_of(args, tile);
    return {tile, key_tiles(mask, tile.q_start, tile.num_rows).num_visited};
}

// ---- Static ----

// BALANCED_ROUNDS: assign tiles in rounds (BalancedScheduler), not in pairs of a long and a short
// tile (StaticScheduler). Under a window, the shorter tiles are those whose window begins at or
// before key 0. With a bias, not causal, all tiles take the same time, but count as shorter: those
// are assigned section by section (scheduler.cuh), so the heads of a section can share the bias in
// L2. Under the causal mask alone, tiles differ too much for rounds.
constexpr bool BALANCED_ROUNDS = WINDOW || (BIAS && !CAUSAL);
template <bool BALANCED, bool TAIL> struct BlockSchedulerOf { using type = StaticScheduler; };
template <> struct BlockSchedulerOf<true, false> { using type = BalancedScheduler; };
template <> struct BlockSchedulerOf<false, true> { using type = TailScheduler; };
using BlockScheduler = BlockSchedulerOf<BALANCED_ROUNDS, HAS_TAIL>::type;

template <class Arguments>
__device__ __forceinline__ BlockScheduler block_scheduler(const Arguments& args) {
    const Shape& shape = args.arrays.shape;
    if constexpr (BALANCED_ROUNDS) {
        const int growing = mask_of(args, NoSequence{}).end_query(0);
        const int shorter = WINDOW ? (growing + BLOCK_Q - 1) / BLOCK_Q : args.work_items.singles;
        return {args.work_items, args.arrays.schedule, shape.num_heads_q, shape.batch, shorter};
    } else {
        return {args.work_items, shape.num_heads_q};
    }
}

// Each producer thread, and each warp that recomputes rows, has its own instance: all compute the
// same sequence of tiles.
struct StaticTileScheduler {
    BlockScheduler scheduler;
    explicit __device__ __forceinline__ StaticTileScheduler(const Arguments& args, int = 0)
        : scheduler(block_scheduler(args)) {}
    __device__ __forceinline__ QueryTile next(const Arguments& args) {
        return make_query_tile(scheduler.next(), {}, args);
    }
    template <class Shared>
    __device__ __forceinline__ WholeTile acquire(const Arguments& args, Shared&) {
        return next_work_tile(*this, args);
    }
    __device__ __forceinline__ QueryTile revisit(const Arguments& args) { return next(args); }
};

// The same, of full calls, with parts of the last tiles: a block's share comes after its whole
// tiles.
struct PartTileScheduler {
    int item = blockIdx.x, taken = 0;                       // whole tiles; key tiles of the share
    explicit __device__ __forceinline__ PartTileScheduler(const Arguments&, int = 0) {}

    __device__ __forceinline__ PartOfTile next_part(const Arguments& args) {
        const KeyShares shares(args, gridDim.x);
        const auto tile_of = [&](int number) {
            return make_query_tile(coord_of_item(args, number), {}, args);
        };
        if (item < shares.whole) {
            item += gridDim.x;
            return {{tile_of(item - gridDim.x), shares.key_tiles}, 0, -1};
        }
        const int block = blockIdx.x, position = block * shares.share + taken;
        const int end = min((block + 1) * shares.share, shares.divided * shares.key_tiles);
        if (position >= end) return {{{{}, 0, 0, 0, 0}, 1}, 0, -1};
        const int tile = position / shares.key_tiles, first = position - tile * shares.key_tiles;
        const int last = min(shares.key_tiles, first + end - position);
        taken += last - first;
        return {{tile_of(shares.whole + tile), last}, first, slot_of_part(block, tile)};
    }
    template <class Shared>
    __device__ __forceinline__ PartOfTile acquire(const Arguments& args, Shared&) {
        return next_part(args);
    }
    // Rows of parts are left to forward_merge.cu.
    __device__ __forceinline__ QueryTile revisit(const Arguments& args) {
        const PartOfTile work = next_part(args);
        if (work.slot < 0) return work;
        return {{}, 0, 0, 0, 0};
    }
};
__device__ __forceinline__ PartOfTile next_work_tile(
    PartTileScheduler& scheduler, const Arguments& args) {
    return scheduler.next_part(args);
}

// ---- Dynamic ----

// The warp that loads Q takes tiles from a counter and publishes them. A packed sequence's tiles
// are numbered by slots (packed_sequences.cuh), those of the longest sequence first within a head.
// Tiles with segment ids or the user's mask are numbered in the order of prepare/segment_order.cu,
// longest first.
// `last`: the number of the block's previous tile, -1 before the first.
template <class Arguments> struct DynamicTileScheduler {
    int last;
    bool started = false;
    PipelineState<WORK_SLOTS> slot;
    explicit __device__ __forceinline__ DynamicTileScheduler(const Arguments&, int last = -1)
        : last(last) {}

    // Called by a whole warp. No tile: num_rows <= 0.
    static __device__ __forceinline__ QueryTile tile_of_slot(const Arguments& args, int number) {
        const int slots = num_query_tiles(args, BLOCK_Q);
        const Shape& shape = args.arrays.shape;
        if constexpr (SKIPS_TILES)
            return make_query_tile(
                tile_in_order(number, args.tile_order, slots, shape.num_heads_q,
                              shape.batch, args.arrays.schedule), {}, args);
        TileCoord coord = tile_of_block(
            number, slots, shape.num_heads_q, shape.batch, args.arrays.schedule);
        coord.tile = slots - 1 - coord.tile;
        auto sequence = sequence_of_block<false>(args, coord.tile, BLOCK_Q, true);
        // A sequence without keys loads another key of the array, fully masked.
        if constexpr (PACKED) sequence.first_k = min(sequence.first_k, shape.seqlen_k - 1);
        return make_query_tile(coord, sequence, args);
    }
    // The number of the block's next tile, by a whole warp. The counter counts the tiles taken
    // after each block's first, which is blockIdx.x.
    static __device__ __forceinline__ int take_number(const Arguments& args) {
        int taken = 0;
        if (threadIdx.x % 32 == 0) taken = atomicAdd(args.tile_counter, 1);
        return gridDim.x + __shfl_sync(WHOLE_WARP, taken, 0);
    }
    // Called by the warp that loads Q. After the last tile, returns num_rows = 0 and in q_start the
    // number of the block's last tile, for revisit().
    __device__ __forceinline__ QueryTile next(const Arguments& args) {
        for (;;) {
            const int number = started ? take_number(args) : blockIdx.x;
            started = true;
            if (number >= args.work_items.items) return {{}, last, 0, 0, 0};
            const QueryTile tile = tile_of_slot(args, number);
            if (tile.num_rows <= 0) continue;
            if (threadIdx.x % 32 == 0) args.previous_tiles[number] = last;
            last = number;
            return tile;
        }
    }
    // Called by the producer of K and V.
    template <class Shared>
    __device__ __forceinline__ WorkTile acquire(const Arguments&, Shared& shared) {
        shared.work_tiles.acquire(slot.index, slot.phase);
        const WorkTile tile = shared.work_tiles[slot.index];
        slot.next();
        return tile;
    }
    // Called by each warp that recomputes rows: the block's tiles again, from the last to the
    // first.
    __device__ __forceinline__ QueryTile revisit(const Arguments& args) {
        if (last < 0) return {{}, 0, 0, 0, 0};
        const QueryTile tile = tile_of_slot(args, last);
        last = args.previous_tiles[last];
        return tile;
    }
};

template <bool, bool, class Arguments> struct TileSchedulerOf {
    using type = StaticTileScheduler;
};
template <class Arguments> struct TileSchedulerOf<true, false, Arguments> {
    using type = DynamicTileScheduler<Arguments>;
};
template <class Arguments> struct TileSchedulerOf<false, true, Arguments> {
    using type = PartTileScheduler;
};
using TileScheduler = TileSchedulerOf<DYNAMIC_SCHEDULER, KEY_PARTS, Arguments>::type;
