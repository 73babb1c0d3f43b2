// The smallest and the largest segment id of each tile of BLOCK_Q queries and of BLOCK_K keys, from
// which other kernels see that tiles have no id in common (pair_mask.cuh). Also zeroes the dynamic
// scheduler's counter.
//
// Grid: one warp a tile. Block: NUM_THREADS threads.
// Constants: Arguments, what it takes; SEGMENTS, HAS_MASK (of pair_mask.cuh), BLOCK_Q, BLOCK_K,
// NUM_THREADS. No shared memory.
//
// Bound by memory: 4 bytes a token.
#include "score/pair_mask.cuh"

// The range of id_of(token) over a tile's tokens, in every lane of the warp.
template <class IdOf> inline IdRange range_of(int first, int end, IdOf id_of) {
    IdRange range = {2147483647, -2147483647 - 1};
    for (int token = first + threadIdx.x % 32; token < end; token += 32) {
        const int id = id_of(token);
        range = {min(range.low, id), max(range.high, id)};
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        range.low = min(range.low, __shfl_xor_sync(0xFFFFFFFFu, range.low, distance));
        range.high = max(range.high, __shfl_xor_sync(0xFFFFFFFFu, range.high, distance));
    }
    return range;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
segment_ranges(const __grid_constant__ Arguments args) {
    const Shape& shape = arrays_of(args).shape;
    const int q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    const int k_tiles = (shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
    const i64 first_k = i64(shape.batch) * q_tiles;
    const i64 number = i64(blockIdx.x) * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (number >= first_k + i64(shape.batch) * k_tiles) return;
    const bool of_keys = number >= first_k;
    const i64 rest = of_keys ? number - first_k : number;
    const int tiles = of_keys ? k_tiles : q_tiles, block = of_keys ? BLOCK_K : BLOCK_Q;
    const int batch = rest / tiles, start = rest % tiles * block;
    if (number == 0 && threadIdx.x == 0) clear_tile_counter(args);
    const PairMask pair_mask(args, batch);
    const IdRange range = of_keys
        ? range_of(start, min(start + block, shape.seqlen_k),
                   [&](int token) { return pair_mask.id_of_key(token); })
        : range_of(start, min(start + block, shape.seqlen_q),
                   [&](int token) { return pair_mask.id_of_query(token); });
    if (threadIdx.x % 32 != 0) return;
    if (of_keys) args.key_tile_ids[rest] = range;
    else args.query_tile_ids[rest] = range;
}
