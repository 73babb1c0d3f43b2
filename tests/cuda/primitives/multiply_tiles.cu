// mma_16x8x16: D = A B + C, one MMA per block of 32 threads. All arrays are row-major: a is
// (blocks, 16, 16) and b (blocks, 16, 8), of Element; c and d are (blocks, 16, 8). ptx.cuh defines
// which lane holds what. Constants: Element.
#include "common/ptx.cuh"

struct Arguments { const Element* a; const Element* b; const float* c; float* d; };

inline u32 pair(Element low, Element high) { return low.bits | static_cast<u32>(high.bits) << 16; }

extern "C" __global__ void multiply_tiles(const __grid_constant__ Arguments arguments) {
    const Element* a = arguments.a + blockIdx.x * 256;
    const Element* b = arguments.b + blockIdx.x * 128;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 a_fragment[4], b_fragment[2];
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        const Element* at = a + (g + i % 2 * 8) * 16 + t * 2 + i / 2 * 8;
        a_fragment[i] = pair(at[0], at[1]);
    }
    for (int i = 0; i < 2; ++i) {
        const Element* at = b + (t * 2 + i * 8) * 8 + g;
        b_fragment[i] = pair(at[0], at[8]);
    }
    const int first = blockIdx.x * 128 + g * 8 + t * 2;
    for (int i = 0; i < 4; ++i) sums[i] = arguments.c[first + i / 2 * 64 + i % 2];
    mma_16x8x16(sums, a_fragment, b_fragment[0], b_fragment[1], Element{});
    for (int i = 0; i < 4; ++i) arguments.d[first + i / 2 * 64 + i % 2] = sums[i];
}
