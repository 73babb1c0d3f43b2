// Before a deterministic backward pass: zeroes the exact sums (score/exact_sums.cuh) of the
// gradients of the user's arrays.
//
// Grid: any number of blocks, which share the sums. Block: NUM_THREADS threads.
// Constants: Element, NUM_THREADS, Arguments. No shared memory.
//
// Bound by memory: the sums are written once.
#include "common/constants.cuh"
#include "score/exact_sums.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
clear_array_sums(const __grid_constant__ Arguments args) {
    using Real = Accumulator<Element>;
    ex::for_each_sums<Real, NUM_THREADS>(args, [](auto sums, int, i64 first, i64 step) {
        for (i64 i = first; i < sums.count * sums.WORDS; i += step) sums.words[i] = 0;
    });
}
