// One lane has exited before its warp executes mma.sync.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void mma_without_a_lane(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x;
    if (BROKEN && lane == 31) return;
    float d[4] = {a.x[lane], a.x[32 + lane], a.x[64 + lane], a.x[96 + lane]};
    const u32 zero[4] = {0, 0, 0, 0};
    mma_16x8x16(d, zero, 0, 0, float16{});                      // caught here
    for (int i = 0; i < 4; ++i) a.out[32 * i + lane] = d[i];
}
