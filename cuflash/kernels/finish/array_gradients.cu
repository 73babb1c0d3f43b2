// After a deterministic backward pass: the gradients of the user's arrays, from their exact sums
// (score/exact_sums.cuh), rounded.
//
// Grid: any number of blocks, which share the elements. Block: NUM_THREADS threads.
// Constants: Element, NUM_THREADS, Arguments. No shared memory.
//
// Bound by memory: the sums are read twice.
#include "common/constants.cuh"
#include "score/exact_sums.cuh"

using Real = Accumulator<Element>;

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
round_array_gradients(const __grid_constant__ Arguments args) {
    ex::for_each_sums<Real, NUM_THREADS>(args, [&](auto sums, int slot, i64 first, i64 step) {
        Real* gradient = static_cast<Real*>(args.dmods[slot]);
        for (i64 i = first; i < sums.count; i += step) gradient[i] = sums.rounded(i);
    });
}
