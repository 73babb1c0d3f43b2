// Tile scheduler of the backward kernels on Hopper: which key tiles a block takes, and the query
// tiles that it visits for each.
//
// A work tile is BLOCK_K keys of one key head. A block takes one work tile after another: first the
// tile of its own index, then each time the next index of a counter in global memory. If
// DETERMINISTIC, all indices come from the counter. Where tiles are skipped, an index counts tiles
// in the order of prepare/segment_order.cu. The Q producer publishes each work tile, and its packed
// sequence, one tile ahead of the consumers. An iteration is one query tile that sees the keys;
// iterations go through the query heads of the group in turn.
//
// HEADS_INNERMOST (CAUSAL, heads of a group, any order of sums): iterations start with the last
// query tile, and go through all heads of the group before the query tile before it. The last
// queries see all keys, so blocks that start together read the same tiles of Q and dO, and add to
// the same dQ, at the same time. With heads outermost the blocks of later keys, which fewer queries
// see, are sooner at the next head. Soon all heads of the group are being read, and if these do not
// fit in L2, every key tile reads them from memory.
//
// OWNED_DQ: a block takes a head, and all its key tiles in turn, the last ones first, so that the
// first query tiles, which few of them see, are complete last (backward_owned_dq.cuh).
//
// Parts (no order of dQ's sums): a work tile may have some of a key tile's iterations. The parts of
// a key tile hand on sums of dK and dV (backward_parts.cuh). The first parts of many key tiles come
// first, then their second ones, so a part seldom waits for the one before it.
// - GROUP_PARTS > 1 (CAUSAL): as many parts, of equal numbers of query heads of the group, so that
//   fewer heads are read at a time: they stay in L2.
// - TAIL_PARTS > 1 (not CAUSAL): key tiles take equally long, and their number is seldom a multiple
//   of that of blocks. Those that are left once all blocks have had equally many have that many
//   parts, so that all blocks have work until the end.
//
// SharedPlan has work_tiles[WORK_STAGES] and their barriers: work_full, an arrival of the thread
// that publishes; work_empty, an arrival of each warp that reads.
#pragma once
#include "sm90/backward_constants.cuh"
#include "sm90/semaphores.cuh"
#include "common/packed_sequences.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/wgmma.cuh"

// ---- Work tiles ----

constexpr int WORK_STAGES = 2;                              // one tile begins as another ends

// How many work tiles the block had before this one. The stage and phase of the work tile, and the
// phase of K and V, follow from it: one register holds them all.
struct WorkState {
    u32 count = 0;
    __device__ __forceinline__ int stage() const { return count % WORK_STAGES; }
    __device__ __forceinline__ u32 phase() const { return count / WORK_STAGES % 2; }
    __device__ __forceinline__ u32 kv_phase() const { return count % 2; }
};

// A key tile of a packed sequence, counted among the sequence's tiles.
struct SequenceTile : TileCoord, Sequence {};
// Part `part` of `parts` of a key tile's iterations; sums: the number of its sums of dK and dV.
struct Part { int part, parts, sums; };
struct PartTile : TileCoord, Part {};
constexpr bool HAS_PARTS = GROUP_PARTS > 1 || TAIL_PARTS > 1;
template <bool, bool> struct WorkTileOf { using type = TileCoord; };
template <> struct WorkTileOf<true, false> { using type = SequenceTile; };
template <> struct WorkTileOf<false, true> { using type = PartTile; };
using WorkTile = WorkTileOf<PACKED, HAS_PARTS>::type;       // `tile` is -1 after the last

__device__ __forceinline__ NoSequence sequence_of(const TileCoord&) { return {}; }
__device__ __forceinline__ const Sequence& sequence_of(const SequenceTile& work) { return work; }

__device__ __forceinline__ Part part_of(TileCoord) { return {0, 1, 0}; }
__device__ __forceinline__ Part part_of(PartTile work) { return work; }

// The tile of a work tile's recompute_flag: packed sequences count all slots.
__device__ __forceinline__ TileCoord flag_coord(TileCoord work) { return work; }
__device__ __forceinline__ TileCoord flag_coord(const SequenceTile& work) {
    return {work.first_slot + work.tile, work.head, work.batch};
}

// Waits until the Q producer has published the work tile.
template <class Shared>
__device__ __forceinline__ WorkTile& acquire_work_tile(Shared& shared, WorkState state) {
    mbarrier_wait(shared_address(&shared.work_full[state.stage()]), state.phase());
    return shared.work_tiles[state.stage()];
}

// By each warp that reads work tiles; `arrives` in one of its lanes.
template <class Shared>
__device__ __forceinline__ void release_work_tile(Shared& shared, WorkState state, bool arrives) {
    mbarrier_arrive_if(arrives, shared_address(&shared.work_empty[state.stage()]));
}

// ---- Indices of work tiles ----

// If DETERMINISTIC or HAS_PARTS, a tile waits for tiles of smaller indices, so these must all
// have been taken by blocks that run. CUDA promises neither an order in which blocks start nor that
// all are resident at once, so the first index is not blockIdx.x. No deadlock: a block takes its
// tiles in the order of indices, and the smallest index in progress waits for none.
constexpr bool WAITS_FOR_TILES = DETERMINISTIC || HAS_PARTS;

__device__ __forceinline__ int next_index(const Arguments& args) {
    return (WAITS_FOR_TILES ? 0 : gridDim.x) + atomicAdd(arrays_of(args).tile_counter, 1);
}
__device__ __forceinline__ int first_index(const Arguments& args) {
    return WAITS_FOR_TILES ? next_index(args) : blockIdx.x;
}

// OWNED_DQ: an index counts the key tiles of all heads, head by head.
__device__ __forceinline__ int first_index(const Arguments& args, int num_k_tiles) {
    return first_index(args) * (OWNED_DQ ? num_k_tiles : 1);
}
__device__ __forceinline__ int index_after(const Arguments& args, int index, int num_k_tiles) {
    if (!OWNED_DQ) return next_index(args);
    return (index + 1) % num_k_tiles != 0 ? index + 1 : next_index(args) * num_k_tiles;
}

// Packed sequences leave slots empty: advances `index` to the first slot that has a tile, `work`.
// By a whole warp.
__device__ __forceinline__ void skip_empty_slots(const Arguments&, int&, int, TileCoord&) {}
template <class Arguments>
__device__ __forceinline__ void skip_empty_slots(
    const Arguments& args, int& index, int num_k_tiles, SequenceTile& work) {
    const int num_heads = args.arrays.shape.num_heads_kv;
    while (index < num_k_tiles * num_heads) {
        TileCoord coord = tile_of_block(index, num_k_tiles, num_heads, 1, args.arrays.schedule);
        const auto sequence = sequence_of_block<true>(args, coord.tile, BLOCK_K, false);
        work = {coord, sequence};
        if (sequence.has_tile) return;
        if (threadIdx.x % 32 == 0) index = next_index(args);
        index = __shfl_sync(WHOLE_WARP, index, 0);
    }
}

// LAST_KEYS_FIRST: a key tile begins at query tiles that the other key tiles reach later, so those
// that start together seldom wait for one another. But the longest come last. So in the last
// section of heads (scheduler.cuh) the first keys come first. These all begin with their last query
// tile, where each waits for those before it: few, as that section has many heads.
__device__ __forceinline__ bool starts_with_last_keys(const Arguments& args, TileCoord work) {
    if (!LAST_KEYS_FIRST) return false;
    return before_last_section(
        work, arrays_of(args).shape.num_heads_kv, arrays_of(args).schedule);
}

// The work tile of an index, not of packed sequences.
template <class Arguments>
__device__ __forceinline__ TileCoord tile_at(const Arguments& args, int num_k_tiles, int index) {
    const Shape& shape = args.arrays.shape;
    if constexpr (OWNED_DQ) {
        const int pair = index / num_k_tiles;
        return {num_k_tiles - 1 - index % num_k_tiles, pair % shape.num_heads_kv,
                pair / shape.num_heads_kv};
    }
    if constexpr (SKIPS_TILES)
        return tile_in_order(index, args.tile_order, num_k_tiles, shape.num_heads_kv,
                             shape.batch, args.arrays.schedule);
    else
        return tile_of_block(index, num_k_tiles, shape.num_heads_kv, shape.batch * GROUP_PARTS,
                             args.arrays.schedule);
}

// Key tiles that have no parts; the number of indices.
__device__ __forceinline__ int num_whole_tiles(int num_tiles) {
    return num_tiles - num_tiles % gridDim.x;
}
__device__ __forceinline__ int num_indices(const Arguments& args, int num_k_tiles) {
    const Shape& shape = arrays_of(args).shape;
    const int num_tiles = num_k_tiles * shape.num_heads_kv * shape.batch * GROUP_PARTS;
    if (TAIL_PARTS == 1) return num_tiles;
    const int whole = num_whole_tiles(num_tiles);
    return whole + (num_tiles - whole) * TAIL_PARTS;
}

// The work tile of an index below num_indices().
__device__ __forceinline__ void set_tile(
    const Arguments& args, int num_k_tiles, int index, TileCoord& work) {
    work = tile_at(args, num_k_tiles, index);
}
__device__ __forceinline__ void set_tile(
    const Arguments& args, int num_k_tiles, int index, PartTile& work) {
    const Shape& shape = arrays_of(args).shape;
    Part part = {0, 1, 0};
    if (TAIL_PARTS > 1) {
        const int num_tiles = num_k_tiles * shape.num_heads_kv * shape.batch;
        const int whole = num_whole_tiles(num_tiles);
        if (index >= whole) {
            const int rest = num_tiles - whole;
            part = {(index - whole) / rest, TAIL_PARTS, (index - whole) % rest};
            index = whole + part.sums;
        }
    }
    static_cast<TileCoord&>(work) = tile_at(args, num_k_tiles, index);
    if (GROUP_PARTS > 1) {                                  // batch counts those of all parts
        part = {work.batch / shape.batch, GROUP_PARTS, 0};
        work.batch %= shape.batch;
        part.sums = (work.batch * shape.num_heads_kv + work.head) * num_k_tiles + work.tile;
    }
    static_cast<Part&>(work) = part;
}
// If LAST_KEYS_FIRST; it counts keys from the last one where those come first.
__device__ __forceinline__ void order_keys(
    const Arguments& args, int num_k_tiles, TileCoord& work) {
    if (starts_with_last_keys(args, work)) work.tile = num_k_tiles - 1 - work.tile;
}

// ---- Query tiles of a work tile ----

static_assert(!HAS_PARTS || !(WINDOW || PACKED || DETERMINISTIC || SKIPS_TILES || HEADS_INNERMOST),
              "other calls have an order, or skip tiles");
static_assert((GROUP_PARTS == 1 || CAUSAL) && (TAIL_PARTS == 1 || !CAUSAL),
              "key tiles are alike in full calls alone");
static_assert(!HEADS_INNERMOST || (CAUSAL && !WINDOW && !DETERMINISTIC && !SKIPS_TILES),
              "other calls have an order, or skip tiles");
static_assert(!OWNED_DQ || !(WINDOW || WARP_PRODUCER || DETERMINISTIC || HEADS_INNERMOST
                             || HAS_PARTS),
              "a block visits consecutive tiles, in its own order");

// No query sees keys left of every WINDOW, nor keys of a sequence without queries. The first query
// tile is visited all the same, so that every key tile takes part in the pipeline and consecutive
// key tiles stay consecutive at a query tile.
template <class Sequence>
__device__ __forceinline__ QueryTiles query_tiles(
    const Arguments& args, int k_tile, const Sequence& sequence) {
    const Mask<CAUSAL, WINDOW> mask{
        seqlen_q_of(args, sequence), seqlen_k_of(args, sequence), window_of<WINDOW>(args)};
    QueryTiles tiles = mask.query_tiles(k_tile * BLOCK_K, BLOCK_Q, BLOCK_K);
    if (WINDOW || PACKED) tiles.end = max(tiles.end, tiles.first + 1);
    return tiles;
}

// The pairs of a work tile, as those of the first query head of its group.
__device__ __forceinline__ PairMask pair_mask_of(const Arguments& args, TileCoord work) {
    PairMask pair_mask(args, work.batch);
    if constexpr (MASK_MOD) {
        const Shape& shape = arrays_of(args).shape;
        pair_mask.set_head(work.head * (shape.num_heads_q / shape.num_heads_kv));
    }
    return pair_mask;
}

// Iterations of a work tile: its part of the query tiles that see it, for each query head, in
// ascending order or, LAST_KEYS_FIRST in the last section, descending. Where tiles are skipped by a
// whole warp, and at least one query tile a head.
struct QueryTileIterator {
    int first, end;             // [first, end); descending (end, first]; HEADS_INNERMOST: of heads
    int head, tile, remaining;
    __device__ __forceinline__ QueryTileIterator(
        const Arguments& args, QueryTiles tiles, TileCoord work,
        Part part = {0, 1, 0})
        : first(tiles.first), end(tiles.end), tile(tiles.first) {
        const Shape& shape = arrays_of(args).shape;
        const int group_size = shape.num_heads_q / shape.num_heads_kv;
        head = work.head * group_size;
        remaining = group_size * (end - first);
        if constexpr (HAS_PARTS) {
            const int begin = remaining * part.part / part.parts;
            remaining = remaining * (part.part + 1) / part.parts - begin;
            head += begin / (end - first);
            tile += begin % (end - first);
        }
        if (LAST_KEYS_FIRST && !starts_with_last_keys(args, work)) {
            tile = first = tiles.end - 1;
            end = tiles.first - 1;
        }
        if constexpr (HEADS_INNERMOST) {
            first = head;
            end = head + group_size;
            tile = tiles.end - 1;
        }
        if constexpr (SKIPS_TILES) {
            const PairMask pair_mask = pair_mask_of(args, work);
            const int visited = pair_mask.query_tiles_between(first, end, work.tile);
            remaining = group_size * max(visited, 1);
            if (visited > 0)
                tile = first = pair_mask.query_tile_after(first - 1, work.tile, end);
        }
    }
    __device__ __forceinline__ void next(const Arguments& args, TileCoord work) {
        --remaining;
        if constexpr (HEADS_INNERMOST) {
            if (++head < end) return;
            head = first;
            --tile;
            return;
        }
        if constexpr (SKIPS_TILES)
            tile = pair_mask_of(args, work).query_tile_after(tile, work.tile, end);
        else
            tile += LAST_KEYS_FIRST && end < first ? -1 : 1;
        if (LAST_KEYS_FIRST ? tile != end : tile < end) return;
        tile = first;
        ++head;
    }
};

// The index of a query tile among those of all heads; with packed sequences, among slots.
__device__ __forceinline__ int query_tile_index(
    const Arguments& args, NoSequence, int batch, int head, int tile) {
    return (batch * args.arrays.shape.num_heads_q + head) * num_query_tiles(args, BLOCK_Q) + tile;
}
__device__ __forceinline__ int query_tile_index(
    const Arguments& args, const Sequence& sequence, int batch, int head, int tile) {
    return query_tile_index(args, NoSequence{}, batch, head, tile)
         + sequence.first_q / BLOCK_Q + sequence.number;
}

// An iteration's addition to dQ. If DETERMINISTIC, the key tiles that add to a query tile's dQ do
// so in the order of `rank`, without gaps; `semaphore` is the query tile whose semaphore they use.
struct DqAddition {
    int query_tile, semaphore, rank;                        // query tiles: indices as above
    bool acquires, releases;
};

// Work tiles of a head, if each has KEY_TILES key tiles.
template <int KEY_TILES> __device__ __forceinline__ int num_works(const Arguments& args) {
    return (num_key_tiles(args, BLOCK_K) + KEY_TILES - 1) / KEY_TILES;
}

// Calls f(DqAddition) for each of the block's iterations, by a whole warp. INTERVAL query tiles of
// a head share the semaphore of the first: a key tile acquires it before it adds to any of them,
// and releases it after all. A work tile has KEY_TILES of them, which add together.
template <int INTERVAL, int KEY_TILES = 1, class Shared, class F>
__device__ __forceinline__ void for_each_iteration(const Arguments& args, Shared& shared, F f) {
    static_assert(INTERVAL == 1 || !WINDOW, "predecessors see only a part of the query tiles");
    const int lane = threadIdx.x % 32;
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) break;
        __syncwarp();
        const auto sequence = sequence_of(work);
        const bool last_keys_first = starts_with_last_keys(args, work);
        const int number = work.tile / KEY_TILES;
        const int rank = last_keys_first ? num_works<KEY_TILES>(args) - 1 - number : number;
        // The key tile of the rank before visits the query tiles [first_before, end_before).
        const int first_before =
            last_keys_first ? query_tiles(args, work.tile + KEY_TILES, sequence).first : 0;
        constexpr bool BOUNDED = WINDOW && DETERMINISTIC && !LAST_KEYS_FIRST;
        const int end_before = BOUNDED ? query_tiles(args, work.tile - 1, sequence).end : 0;
        release_work_tile(shared, state, lane == 0);
        QueryTileIterator it(args, query_tiles(args, work.tile, sequence), work, part_of(work));
        for (; it.remaining > 0; it.next(args, work)) {
            const int of_semaphore = it.tile % INTERVAL;
            const int step = LAST_KEYS_FIRST && it.end < it.first ? -1 : 1;
            const int first = step < 0 ? INTERVAL - 1 : 0, last = INTERVAL - 1 - first;
            const int index = query_tile_index(args, sequence, work.batch, it.head, it.tile);
            f(DqAddition{
                index, index - of_semaphore, rank,
                rank > 0 && (INTERVAL == 1 || of_semaphore == first || it.tile == it.first)
                    && it.tile - of_semaphore + INTERVAL > first_before
                    && (!BOUNDED || it.tile < end_before),
                INTERVAL == 1 || of_semaphore == last || it.tile + step == it.end});
        }
    }
}
