// score/exact_sums.cuh: each thread of each block adds its x to sum `places` of it; then the last
// kernel call, with round = 1, rounds. Element decides the format.
#include "common/constants.cuh"
#include "score/exact_sums.cuh"

using Real = Accumulator<Element>;

struct Launch {
    const Real* x;
    const int* places;
    u64* words;
    Real* rounded;
    int count, sums, round;
};

extern "C" __global__ void add_exactly(const __grid_constant__ Launch a) {
    const ex::ExactSums<Real> sums{a.words, a.sums};
    const int thread = blockIdx.x * 32 + threadIdx.x, threads = gridDim.x * 32;
    if (a.round) for (int i = thread; i < a.sums; i += threads) a.rounded[i] = sums.rounded(i);
    else for (int i = thread; i < a.count; i += threads) sums.add(a.places[i], a.x[i]);
}
