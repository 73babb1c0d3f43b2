// low_half and high_half: one pair per thread. Constants: Element.
#include "common/ptx.cuh"

struct Arguments { const u32* pair; Element* low; Element* high; };

extern "C" __global__ void unpack_pairs(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.low[i] = low_half<Element>(a.pair[i]);
    a.high[i] = high_half<Element>(a.pair[i]);
}
