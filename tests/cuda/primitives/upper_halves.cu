// max_of_upper_halves, and that of sizes: three numbers a thread.
#include "common/ptx.cuh"

struct Arguments { const u32* m; const float* a; const float* b; u32 *y, *of_sizes; };

extern "C" __global__ void upper_halves(const __grid_constant__ Arguments all) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    all.y[i] = max_of_upper_halves(all.m[i], all.a[i], all.b[i]);
    all.of_sizes[i] = max_of_upper_halves_of_sizes(all.m[i], all.a[i], all.b[i]);
}
