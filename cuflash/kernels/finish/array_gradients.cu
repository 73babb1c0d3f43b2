// After a deterministic backward pass: the gradients of the user's arrays, from their exact sums
// (score/exact_sums.cuh), rounded.
//
// Grid: any number of blocks, which share the elements. Block: NUM_THREADS threads.
// Constants: Element, NUM_THREADS, Arguments. No shared memory.
//
// Bound by memory: the sums are read twice.
#include "score/exact_sums.cuh"

using Real = Accumulator<Element>;
using Sums = ex::ExactSums<Real>;

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
round_array_gradients(const __grid_constant__ Arguments args) {
    const i64 thread = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const i64 threads = i64(gridDim.x) * NUM_THREADS;
    for (int slot = 0; slot < ex::MOST_ARRAYS; ++slot) {
        const Sums sums = Sums::of(args, slot);
        if (sums.words == nullptr) continue;
        Real* gradient = static_cast<Real*>(args.dmods[slot]);
        for (i64 i = thread; i < sums.count; i += threads) gradient[i] = sums.rounded(i);
    }
}
