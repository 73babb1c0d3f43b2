// The order in which blocks take tiles with segment ids: those that visit most tiles first, so that
// none of the long ones begins last. Tiles of all batches together, queries' or, OF_KEYS, keys';
// of as long ones that of the smaller number first. A tile's number is batch * tiles + tile.
//
// More tiles than threads stay in the order of their numbers, a batch's query tiles in the reverse
// order: under the causal mask the first are the longest. So many are some for each
// multiprocessor, of each head, and what it has last matters little.
//
// Grid: one block, after segment_ranges.cu. Block: NUM_THREADS threads; a warp counts what a tile
// visits, then a thread ranks it.
// Constants: Arguments, what it takes; SEGMENTS, KEEP (of pairs.cuh), WINDOW, CAUSAL, OF_KEYS,
// BLOCK_Q, BLOCK_K, NUM_THREADS. Shared memory: an int a thread. Bound by latency: few tiles.
#include "pairs.cuh"

// How many tiles the main kernel visits for that one. By a whole warp.
inline int visits(const Arguments& all, const Mask<CAUSAL, WINDOW>& mask, int batch, int tile) {
    const Pairs pairs(all, batch);
    int met;
    if constexpr (OF_KEYS) {
        const QueryTiles tiles = mask.query_tiles(tile * BLOCK_K, BLOCK_Q, BLOCK_K);
        met = pairs.query_tiles_between(tiles.first, tiles.end, tile);
    } else {
        const KeyTiles tiles = mask.key_tiles(tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
        met = pairs.key_tiles_before(tile, tiles.num_visited, tiles.first);
    }
    return max(met, 1);                                     // one that is hidden, if no other is
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
segment_order(const __grid_constant__ Arguments all) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    int (&lengths)[NUM_THREADS] = *reinterpret_cast<int (*)[NUM_THREADS]>(shared_bytes);
    const Shape& shape = arrays_of(all).shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(all)};
    const int tiles = OF_KEYS ? mask.num_tiles(shape.seqlen_k, BLOCK_K)
                              : mask.num_tiles(shape.seqlen_q, BLOCK_Q);
    const int count = shape.batch * tiles, thread = threadIdx.x;
    int* order = order_behind_counter(all);
    if (count > NUM_THREADS) {
        for (int i = thread; i < count; i += NUM_THREADS)
            order[i] = OF_KEYS ? i : i / tiles * tiles + (tiles - 1 - i % tiles);
        return;
    }
    for (int number = thread / 32; number < count; number += NUM_THREADS / 32) {
        const int length = visits(all, mask, number / tiles, number % tiles);
        if (thread % 32 == 0) lengths[number] = length;
    }
    __syncthreads();                                        // all lengths are there
    if (thread >= count) return;
    const int own = lengths[thread];
    int rank = 0;                                           // those that come before: a place each
    for (int i = 0; i < count; ++i)
        if (lengths[i] > own || (lengths[i] == own && i < thread)) ++rank;
    order[rank] = thread;
}
