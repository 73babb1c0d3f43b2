// mma_16x8x8: D = A B + C of tf32 numbers, in float, one MMA per block of 32 threads. All arrays
// are row-major: a is (blocks, 16, 8), b (blocks, 8, 8); c and d are (blocks, 16, 8). ptx.cuh
// defines which lane holds what.
#include "common/ptx.cuh"

struct Arguments { const u32* a; const u32* b; const float* c; float* d; };

extern "C" __global__ void multiply_tf32(const __grid_constant__ Arguments arguments) {
    const u32* a = arguments.a + blockIdx.x * 128;
    const u32* b = arguments.b + blockIdx.x * 64;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 a_fragment[4];
    float sums[4];
    for (int i = 0; i < 4; ++i) a_fragment[i] = a[(g + i % 2 * 8) * 8 + t + i / 2 * 4];
    const int first = blockIdx.x * 128 + g * 8 + t * 2;
    for (int i = 0; i < 4; ++i) sums[i] = arguments.c[first + i / 2 * 64 + i % 2];
    mma_16x8x8(sums, a_fragment, b[t * 8 + g], b[(t + 4) * 8 + g]);
    for (int i = 0; i < 4; ++i) arguments.d[first + i / 2 * 64 + i % 2] = sums[i];
}
