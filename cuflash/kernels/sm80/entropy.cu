// entropy, the entropy of each query's weights, for 16-bit types by mma.sync, sm_80 and newer:
// readouts/entropy.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_WARPS, BLOCKS_PER_SM,
// SHARED_BYTES; HEAD_DIM, the head dimension rounded up to a multiple of 32, and PADDED, whether
// that changed it; Arguments and the options (docs/guide/options.md).
// Shared memory, in bytes of smem.cuh's tiles: q (BLOCK_Q rows), NUM_STAGES times k (BLOCK_K rows).
//
// Bad at: head_dim above 128, of which a warp keeps fewer rows; Hopper, whose wgmma multiplies
// faster.
#include "readouts/entropy.cuh"
#include "sm80/pair_tiles.cuh"

using Tiles = PairTiles<BLOCK_Q, BLOCK_K>;
static_assert(sizeof(EntropyPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
entropy_sm80(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    entropy_of_queries<Tiles>(args, shared_bytes);
}
