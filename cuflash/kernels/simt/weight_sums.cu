// weight_sums, the sums (or maxima) of each key's weights, on CUDA cores; correct, not optimised:
// readouts/weight_sums.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_THREADS, SHARED_BYTES;
// HEAD_DIM, the head dimension rounded up to a multiple of a row's threads; REDUCE_MAX,
// ROW_WEIGHTS; Arguments and the options (docs/guide/options.md).
// Shared memory, in Real, rows of HEAD_DIM + 1: k (BLOCK_K rows), NUM_STAGES times q (BLOCK_Q
// rows), lse and row_weights (BLOCK_Q numbers).
//
// Bad at: speed: nothing is loaded ahead.
#include "readouts/weight_sums.cuh"
#include "simt/pair_tiles.cuh"

using Tiles = PairTiles<BLOCK_K, BLOCK_Q>;
static_assert(sizeof(WeightSumsPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
weight_sums_simt(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    weight_sums_of_keys<Tiles>(args, shared_bytes);
}
