// Zeroes the dynamic scheduler's counter, for calls whose other preparing kernels have run before:
// those that share the flags of prepare/tile_flags.cu.
//
// Grid: one block. Block: NUM_THREADS threads. Constants: Arguments, Element, NUM_THREADS.
#include "common/constants.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
tile_counter(const __grid_constant__ Arguments args) {
    if (threadIdx.x == 0) clear_tile_counter(args);
}
