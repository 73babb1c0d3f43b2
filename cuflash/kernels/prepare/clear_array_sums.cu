// Before a deterministic backward pass: zeroes the exact sums (score/exact_sums.cuh) of the
// gradients of the user's arrays.
//
// Grid: any number of blocks, which share the sums. Block: NUM_THREADS threads.
// Constants: Element, NUM_THREADS, Arguments. No shared memory.
//
// Bound by memory: the sums are written once.
#include "score/exact_sums.cuh"

using Sums = ex::ExactSums<Accumulator<Element>>;

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
clear_array_sums(const __grid_constant__ Arguments args) {
    const i64 thread = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const i64 threads = i64(gridDim.x) * NUM_THREADS;
    for (int slot = 0; slot < ex::MOST_ARRAYS; ++slot) {
        const Sums sums = Sums::of(args, slot);
        if (sums.words == nullptr) continue;
        for (i64 i = thread; i < sums.count * Sums::WORDS; i += threads) sums.words[i] = 0;
    }
}
