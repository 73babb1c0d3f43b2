// weights, the weights of chosen queries, on CUDA cores; correct, not optimised:
// readouts/weights.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_THREADS, SHARED_BYTES;
// HEAD_DIM, the head dimension rounded up to a multiple of a row's threads; Result, the type of the
// weights; Arguments and the options (docs/guide/options.md).
// Shared memory, in Real, rows of HEAD_DIM + 1: q (BLOCK_Q rows), NUM_STAGES times k (BLOCK_K
// rows), BLOCK_Q indices.
//
// Bad at: speed: nothing is loaded ahead.
#include "readouts/weights.cuh"
#include "simt/pair_tiles.cuh"

using Tiles = PairTiles<BLOCK_Q, BLOCK_K>;
static_assert(sizeof(WeightsPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
weights_simt(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    weights_of_queries<Tiles>(args, shared_bytes);
}
