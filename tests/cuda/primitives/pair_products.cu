// multiply_pairs, of both types of elements.
#include "common/ptx.cuh"

struct Arguments { const u32 *a, *b; u32 *float16s, *bfloat16s; };

extern "C" __global__ void pair_products(const __grid_constant__ Arguments all) {
    const int i = threadIdx.x;
    all.float16s[i] = multiply_pairs<float16>(all.a[i], all.b[i]);
    all.bfloat16s[i] = multiply_pairs<bfloat16>(all.a[i], all.b[i]);
}
