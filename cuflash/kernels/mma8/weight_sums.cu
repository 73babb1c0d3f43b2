// weight_sums, the sums (or maxima) of each key's weights, for double and float split into tf32
// parts, by mma.sync: readouts/weight_sums.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_WARPS, BLOCKS_PER_SM,
// SHARED_BYTES; HEAD_DIM, the head dimension rounded up to a multiple of 32; REDUCE_MAX,
// ROW_WEIGHTS; Arguments and the options (docs/guide/options.md).
// Shared memory, in elements, rows padded by 4: k (BLOCK_K rows), NUM_STAGES times q (BLOCK_Q
// rows), lse and row_weights (BLOCK_Q numbers).
//
// Bad at: head_dim above 128, where only small tiles fit in shared memory.
#include "mma8/pair_tiles.cuh"
#include "readouts/weight_sums.cuh"

using Tiles = PairTiles<BLOCK_K, BLOCK_Q>;
static_assert(sizeof(WeightSumsPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
weight_sums_mma8(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    weight_sums_of_keys<Tiles>(args, shared_bytes);
}
