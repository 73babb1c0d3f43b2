// weights, the weights of chosen queries, for double and float split into tf32 parts, by mma.sync:
// readouts/weights.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_WARPS, BLOCKS_PER_SM,
// SHARED_BYTES; HEAD_DIM, the head dimension rounded up to a multiple of 32; Result, the type of
// the weights; Arguments and the options (docs/guide/options.md).
// Shared memory, in elements, rows padded by 4: q (BLOCK_Q rows), NUM_STAGES times k (BLOCK_K
// rows), BLOCK_Q indices.
//
// Bad at: head_dim above 128, where only small tiles fit in shared memory.
#include "mma8/pair_tiles.cuh"
#include "readouts/weights.cuh"

using Tiles = PairTiles<BLOCK_Q, BLOCK_K>;
static_assert(sizeof(WeightsPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
weights_mma8(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    weights_of_queries<Tiles>(args, shared_bytes);
}
