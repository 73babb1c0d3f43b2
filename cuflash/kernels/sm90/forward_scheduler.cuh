// Which tile of queries a block of forward.cu computes next, and which key tiles it visits.
#pragma once
#include "common/scheduler.cuh"
#include "sm90/forward_shared.cuh"

// The key tiles of num_rows queries. At least one is visited.
__device__ __forceinline__ KeyTiles key_tiles(
    const Mask<CAUSAL, WINDOW>& mask, int first_row, int num_rows) {
    const KeyTiles tiles = mask.key_tiles(first_row, num_rows, BLOCK_K);
    return {tiles.num_full, max(tiles.num_visited, 1), tiles.first, tiles.first_full};
}

// The first of them, of queries from first_row on.
__device__ __forceinline__ int first_key_tile(const Mask<CAUSAL, WINDOW>& mask, int first_row) {
    return mask.first_key(first_row) / BLOCK_K;
}

template <class Sequence>
__device__ __forceinline__ Mask<CAUSAL, WINDOW> mask_of(
    const Arguments& args, const Sequence& sequence) {
    return {seqlen_q_of(args, sequence), seqlen_k_of(args, sequence), window_of<WINDOW>(args)};
}

// A tile that is not full, but of whole warpgroups' queries, comes where queries see least: under
// the causal mask first, else last. Segments' tiles are counted from the first query.
__device__ __forceinline__ Queries queries_of_tile(
    TileCoord where, const OwnSequence& sequence, const Arguments& args) {
    if (where.tile < 0) return {sequence, 0, 0, 0, 0};
    const int length = seqlen_q_of(args, sequence), groups = (length + GROUP_ROWS - 1) / GROUP_ROWS;
    const int lacking = CAUSAL && !SEGMENTS
        ? (MATH_WARPGROUPS - 1 - (groups - 1) % MATH_WARPGROUPS) * GROUP_ROWS : 0;
    const int first = where.tile * BLOCK_Q - lacking, end = min(first + BLOCK_Q, length);
    return {sequence, max(first, 0), end - max(first, 0), where.head, where.batch};
}

template <class Tiles>
__device__ __forceinline__ Work next_work(Tiles& tiles, const Arguments& arguments) {
    const Queries queries = tiles.next(arguments);
    const Mask<CAUSAL, WINDOW> mask = mask_of(arguments, queries);
    return {queries, key_tiles(mask, queries.first, queries.num_rows).num_visited};
}

// How tiles are dealt. Of a window's those that see key 0, or would see keys before it, are
// shorter. With a bias alone all count as those, and go section by section, as heads may share it.
// (Under the causal mask alone tiles differ too much for rounds: they go in pairs.)
constexpr bool IN_ROUNDS = WINDOW || (BIAS && !CAUSAL);
template <bool> struct WalkOf { using type = StaticScheduler; };
template <> struct WalkOf<true> { using type = BalancedScheduler; };
using Walk = WalkOf<IN_ROUNDS>::type;

template <class Arguments> __device__ __forceinline__ Walk walk_of(const Arguments& args) {
    const Shape& shape = args.arrays.shape;
    if constexpr (IN_ROUNDS) {
        const int growing = mask_of(args, NoSequence{}).end_query(0);
        const int shorter = WINDOW ? (growing + BLOCK_Q - 1) / BLOCK_Q : args.work_items.singles;
        return {args.work_items, args.arrays.schedule, shape.num_heads_q, shape.batch, shorter};
    } else {
        return {args.work_items, shape.num_heads_q};
    }
}

// A block's tiles, one after another. Each who asks counts them for itself.
struct StaticTiles {
    Walk walk;
    explicit __device__ __forceinline__ StaticTiles(const Arguments& args, int = 0)
        : walk(walk_of(args)) {}
    __device__ __forceinline__ Queries next(const Arguments& args) {
        return queries_of_tile(walk.next(), {}, args);
    }
    __device__ __forceinline__ Work told(const Arguments& args, SharedPlan&) {
        return next_work(*this, args);
    }
    __device__ __forceinline__ Queries again(const Arguments& args) { return next(args); }
};

// Taken from a counter by one warp, which publishes them. Slots of packed sequences
// are numbered as tiles are, but of a head those of the longest sequence come first. Tiles with
// segment ids come in the order that was found, longest first.
template <class Arguments> struct DynamicTiles {
    int last;
    bool begun = false;
    PipelineState<WORK_SLOTS> place;
    explicit __device__ __forceinline__ DynamicTiles(const Arguments&, int last = -1)
        : last(last) {}

    // By a whole warp.
    static __device__ __forceinline__ Queries of_slot(const Arguments& args, int number) {
        const int slots = num_query_tiles(args, BLOCK_Q);
        const Shape& shape = args.arrays.shape;
        if constexpr (SEGMENTS)
            return queries_of_tile(
                tile_in_order(number, order_behind_counter(args), slots, shape.num_heads_q,
                              shape.batch, args.arrays.schedule), {}, args);
        TileCoord where = tile_of_block(
            number, slots, shape.num_heads_q, shape.batch, args.arrays.schedule);
        where.tile = slots - 1 - where.tile;
        auto sequence = sequence_of_block<false>(args, where.tile, BLOCK_Q, true);
        // Where there is no key, one of the array's is loaded all the same.
        if constexpr (PACKED) sequence.first_k = min(sequence.first_k, shape.seqlen_k - 1);
        return queries_of_tile(where, sequence, args);
    }
    static __device__ __forceinline__ int* counter(const Arguments& args) {
        if constexpr (PACKED) return &static_cast<FoundSequences*>(args.found)->handed_out;
        else return counter_behind_ranges(args);
    }
    // By the warp that takes them. When none is left, `first` is the last one's number.
    __device__ __forceinline__ Queries next(const Arguments& args) {
        for (;;) {
            const int number = begun ? take_tile(counter(args)) : blockIdx.x;
            begun = true;
            if (number >= args.work_items.items) return {{}, last, 0, 0, 0};
            const Queries queries = of_slot(args, number);
            if (queries.num_rows <= 0) continue;
            if (threadIdx.x % 32 == 0) tile_before(counter(args), number) = last;
            last = number;
            return queries;
        }
    }
    // By those who load keys.
    __device__ __forceinline__ Work told(const Arguments&, SharedPlan& shared) {
        shared.work.await(place.index, place.phase);
        const Work now = shared.work[place.index];
        place.next();
        return now;
    }
    // By each warp that wants them once more, the last one first.
    __device__ __forceinline__ Queries again(const Arguments& args) {
        if (last < 0) return {{}, 0, 0, 0, 0};
        const Queries queries = of_slot(args, last);
        last = tile_before(counter(args), last);
        return queries;
    }
};

template <bool, class Arguments> struct TileSchedulerOf { using type = StaticTiles; };
template <class Arguments> struct TileSchedulerOf<true, Arguments> {
    using type = DynamicTiles<Arguments>;
};
using Tiles = TileSchedulerOf<DYNAMIC_SCHEDULER, Arguments>::type;
