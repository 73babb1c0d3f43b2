// x y by mma.sync, with two registers of x swapped.
#include "common/ptx.cuh"

struct Arguments { const float* x; const float* y; float* out; };

extern "C" __global__ void mma_swapped_a(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const auto pair = [](const float* x, int step) { return pack<float16>(x[0], x[step]); };
    const float* row = a.x + g * 16 + 2 * t;                    // of 16
    const float* column = a.y + 2 * t * 8 + g;                  // of rows of 8
    const int first = BROKEN ? 8 : 8 * 16, second = BROKEN ? 8 * 16 : 8;
    const u32 left[4] = {
        pair(row, 1), pair(row + first, 1), pair(row + second, 1), pair(row + 8 * 16 + 8, 1)};
    const u32 right[2] = {pair(column, 8), pair(column + 64, 8)};
    float d[4] = {0, 0, 0, 0};
    mma_16x8x16(d, left, right[0], right[1], float16{});
    for (int i = 0; i < 4; ++i) a.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
