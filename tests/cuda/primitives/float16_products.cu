// multiply_float16_pairs.
#include "common/ptx.cuh"

struct Arguments { const u32 *a, *b; u32* products; };

extern "C" __global__ void float16_products(const __grid_constant__ Arguments all) {
    const int i = threadIdx.x;
    all.products[i] = multiply_float16_pairs(all.a[i], all.b[i]);
}
