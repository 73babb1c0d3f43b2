// The order in which blocks take tiles where tiles are skipped, because of segment ids or the
// user's mask: those that visit the most tiles first, so that no long tile starts last. It orders
// the query tiles or, OF_KEYS, the key tiles of all batches together; tiles of equal length by
// their numbers. A tile's number is batch * tiles + tile. If the user's mask depends on the head,
// all heads count together.
//
// All ranges of ids are copied to shared memory at once, while each thread computes which tiles the
// mask lets its tile visit. Then LANES lanes per tile count the tiles that it visits, and after
// that the tiles that precede it in the order. Flags of the user's mask stay in global memory: a
// whole warp counts for one tile, with several loads in flight; OF_KEYS, where the flags of a tile
// are a column, for 32 adjacent tiles.
//
// If there are more tiles than threads, or more ranges than fit in shared memory, tiles keep the
// order of their numbers, a batch's query tiles in reverse: under the causal mask the last are the
// longest. That many tiles are several per SM for each head, so the order matters little.
//
// Grid: one block, after prepare/segment_ranges.cu and prepare/tile_flags.cu. Block: NUM_THREADS
// threads. Constants: Arguments, what it takes; SEGMENTS, HAS_MASK, MASK_MOD (of pair_mask.cuh),
// WINDOW, CAUSAL, OF_KEYS, BLOCK_Q, BLOCK_K, NUM_THREADS, SHARED_BYTES. Shared memory: SharedPlan.
//
// Bound by latency: one access to global memory, then a few hundred instructions. Their fetch
// counts too, so loops are not unrolled far.
#include "score/pair_mask.cuh"
#include "common/ptx.cuh"

constexpr int LANES = MASK_MOD ? 32 : 4;                    // that count for one tile
constexpr bool BY_COLUMNS = MASK_MOD && OF_KEYS && !SEGMENTS;
constexpr int MAX_RANGES = 4 * NUM_THREADS;

// The tiles of the other kind [first, end) of its batch that the mask lets a tile visit. The tile
// with the higher rank is taken first.
struct Walk { int batch, first, end, rank; };

struct SharedPlan {
    IdRange ranges[MAX_RANGES];
    Walk walks[NUM_THREADS];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// As if all ids were equal; the rank is not known yet.
inline Walk walk_of(const Mask<CAUSAL, WINDOW>& mask, int batch, int tile) {
    if constexpr (OF_KEYS) {
        const QueryTiles tiles = mask.query_tiles(tile * BLOCK_K, BLOCK_Q, BLOCK_K);
        return {batch, tiles.first, tiles.end, 0};
    } else {
        const KeyTiles tiles = mask.key_tiles(tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
        return {batch, tiles.first, tiles.num_visited, 0};
    }
}

// Calls take(number, sum) for each number below `count`, where sum adds part(number, lane) over
// LANES lanes. Whole block.
template <class Part, class Take> inline void for_each_sum(int count, Part part, Take take) {
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    #pragma unroll 1
    for (int first = 0; first < count; first += NUM_THREADS / LANES) {
        const int number = first + group;
        int sum = number < count ? part(number, lane) : 0;
        for (int distance = 1; distance < LANES; distance *= 2)
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
        if (lane == 0 && number < count) take(number, sum);
    }
}

// MASK_MOD: the lane's share of the tiles that `tile` visits, over all heads of the flags.
inline int visited_of_all_heads(const Arguments& args, const Walk& walk, int tile, int lane) {
    const int others = max(walk.end - walk.first, 0), heads = heads_of_flags(args);
    const int heads_of_flag = FLAGS_OF_GROUPS ? heads_of_group(args) : 1;
    PairMask pair_mask(args, walk.batch);
    int num_visited = 0;
    #pragma unroll 8
    for (int i = lane; i < others * heads; i += LANES) {
        const int other = walk.first + i % others;
        pair_mask.head = i / others * heads_of_flag;
        num_visited += !(OF_KEYS ? pair_mask.skips(other, tile) : pair_mask.skips(tile, other));
    }
    return num_visited;
}

// How many flags of each key tile are visible, over all heads of the flags; those of tiles that the
// mask does not let it visit are not. A warp counts 32 columns, in every `parts`-th row:
// counts[part][batch][key tile]. Returns parts; counts has room for a number a thread. Whole block.
template <class Arguments>
inline int count_columns(const Arguments& args, int* counts, int q_tiles, int k_tiles) {
    constexpr int WARPS = NUM_THREADS / 32;
    const int batches = MASK_OF_BATCH ? arrays_of(args).shape.batch : 1;
    const int rows = heads_of_flags(args) * q_tiles;        // of a batch
    const int blocks = (k_tiles + 31) / 32, units = batches * blocks;
    const int parts = max(WARPS / units, 1);
    #pragma unroll 1
    for (int i = threadIdx.x / 32; i < units * parts; i += WARPS) {
        const int part = i / units, batch = i % units / blocks;
        const int column = i % blocks * 32 + threadIdx.x % 32;
        const unsigned char* flags =
            args.tile_flags + i64(batch) * rows * k_tiles + min(column, k_tiles - 1);
        int num_visible = 0;
        #pragma unroll 8
        for (int row = part; row < rows; row += parts)
            num_visible += (flags[i64(row) * k_tiles] & VISIBILITY_OF_FLAG) != 0;
        if (column < k_tiles) counts[(part * batches + batch) * k_tiles + column] = num_visible;
    }
    return parts;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
segment_order(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const Shape& shape = arrays_of(args).shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_tiles = mask.num_tiles(shape.seqlen_q, BLOCK_Q);
    const int k_tiles = mask.num_tiles(shape.seqlen_k, BLOCK_K);
    const int tiles = OF_KEYS ? k_tiles : q_tiles, count = shape.batch * tiles;
    const i64 num_ranges = i64(shape.batch) * (q_tiles + k_tiles);
    const int thread = threadIdx.x;
    int* order = args.tile_order;
    if (count > NUM_THREADS || (SEGMENTS && num_ranges > MAX_RANGES)) {
        #pragma unroll 1
        for (int i = thread; i < count; i += NUM_THREADS)
            order[i] = OF_KEYS ? i : i / tiles * tiles + (tiles - 1 - i % tiles);
        return;
    }
    if constexpr (SEGMENTS) {
        const u32 ranges = shared_address(shared.ranges);
        const int q_ints = 2 * shape.batch * q_tiles;
        const int* q_ids = reinterpret_cast<const int*>(args.query_tile_ids);
        const int* k_ids = reinterpret_cast<const int*>(args.key_tile_ids);
        #pragma unroll 1
        for (int i = thread; i < 2 * static_cast<int>(num_ranges); i += NUM_THREADS)
            cp_async_4(ranges + 4 * i, i < q_ints ? q_ids + i : k_ids + (i - q_ints), 4);
        cp_async_commit();
    }
    if (thread < count) shared.walks[thread] = walk_of(mask, thread / tiles, thread % tiles);
    cp_async_wait<0>();
    __syncthreads();                                        // all ranges and walks are written
    Arguments shared_args = args;
    shared_args.query_tile_ids = shared.ranges;             // where PairMask reads them
    shared_args.key_tile_ids = shared.ranges + shape.batch * q_tiles;
    // Visits one tile at least, masked if need be.
    const auto set_rank = [&](int number, int num_visited) {
        const int length = max(num_visited, 1);
        shared.walks[number].rank = length * NUM_THREADS + (NUM_THREADS - 1 - number);
    };
    if constexpr (BY_COLUMNS) {
        int* counts = reinterpret_cast<int*>(shared.ranges);        // there are no ranges
        const int parts = count_columns(args, counts, q_tiles, k_tiles);
        const int counted = MASK_OF_BATCH ? count : tiles;
        __syncthreads();                                    // tiles are counted
        if (thread < count) {
            int num_visited = 0;
            for (int i = thread % counted; i < parts * counted; i += counted)
                num_visited += counts[i];
            set_rank(thread, num_visited);
        }
    } else for_each_sum(count, [&](int number, int lane) {
        const Walk& walk = shared.walks[number];
        const int tile = number - walk.batch * tiles;
        if constexpr (MASK_MOD) return visited_of_all_heads(shared_args, walk, tile, lane);
        const PairMask pair_mask(shared_args, walk.batch);
        int num_visited = 0;
        #pragma unroll 4
        for (int other = walk.first + lane; other < walk.end; other += LANES)
            num_visited += !(OF_KEYS ? pair_mask.skips(other, tile) : pair_mask.skips(tile, other));
        return num_visited;
    }, set_rank);
    __syncthreads();                                        // all ranks are written
    for_each_sum(count, [&](int number, int lane) {
        const int rank = shared.walks[number].rank;
        int before = 0;
        #pragma unroll 4
        for (int i = lane; i < count; i += LANES) before += shared.walks[i].rank > rank;
        return before;
    }, [&](int number, int before) { order[before] = number; });
}
