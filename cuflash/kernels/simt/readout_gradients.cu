// The gradients of weights, weight_sums and entropy, on CUDA cores; correct, not optimised:
// readouts/gradients.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_THREADS, SHARED_BYTES;
// HEAD_DIM, the head dimension rounded up to a multiple of a row's threads; OF_KEYS: for dK, else
// for dQ; one of WEIGHTS_GRADIENT, SUMS_GRADIENT and ENTROPY_GRADIENT; Result, the type of dW;
// REDUCE_MAX, ROW_WEIGHTS, CHOSEN (weight_sums.cuh); Arguments and the options
// (docs/guide/options.md).
// Shared memory, in Real, rows of HEAD_DIM + 1: fixed rows, NUM_STAGES times streamed ones, then a
// weight of each pair, and two numbers of each fixed row.
//
// Bad at: speed: nothing is loaded ahead.
#include "readouts/gradients.cuh"
#include "simt/pair_tiles.cuh"

constexpr int ROWS = OF_KEYS ? BLOCK_K : BLOCK_Q, COLUMNS = OF_KEYS ? BLOCK_Q : BLOCK_K;
using Tiles = PairTiles<ROWS, COLUMNS>;
static_assert(sizeof(GradientPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
readout_gradients_simt(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    gradients_of_rows<Tiles>(args, shared_bytes);
}
