// pack: one pair per thread. Constants: Element.
#include "common/ptx.cuh"

struct Arguments { const float* low; const float* high; u32* pair; };

extern "C" __global__ void pack_pairs(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.pair[i] = pack<Element>(a.low[i], a.high[i]);
}
