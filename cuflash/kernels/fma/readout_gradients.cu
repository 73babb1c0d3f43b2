// The gradients of weights, weight_sums and entropy, for float, by fused multiply-adds on register
// tiles: readouts/gradients.cuh says how, and what the grid is.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_STAGES (1 or 2), NUM_WARPS, BLOCKS_PER_SM,
// SHARED_BYTES; HEAD_DIM, the head dimension rounded up to a multiple of 32; OF_KEYS: for dK, else
// for dQ; one of WEIGHTS_GRADIENT, SUMS_GRADIENT and ENTROPY_GRADIENT; Result, the type of dW;
// REDUCE_MAX, ROW_WEIGHTS, CHOSEN (weight_sums.cuh); Arguments and the options
// (docs/guide/options.md).
// Shared memory, in floats, rows padded by 4: fixed rows, NUM_STAGES times streamed ones, then a
// weight of each pair, and two numbers of each fixed row.
//
// Bad at: head_dim above 128, where only small tiles fit in shared memory.
#include "fma/pair_tiles.cuh"
#include "readouts/gradients.cuh"

constexpr int ROWS = OF_KEYS ? BLOCK_K : BLOCK_Q, COLUMNS = OF_KEYS ? BLOCK_Q : BLOCK_K;
using Tiles = PairTiles<ROWS, COLUMNS>;
static_assert(sizeof(GradientPlan<Tiles>) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
readout_gradients_fma(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    gradients_of_rows<Tiles>(args, shared_bytes);
}
