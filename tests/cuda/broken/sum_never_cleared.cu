// Accumulates in a register that was never cleared.

struct Arguments { const float* x; float* out; int turns; };

extern "C" __global__ void sum_never_cleared(const __grid_constant__ Arguments a) {
    float sum[2];
    if constexpr (!BROKEN) sum[0] = sum[1] = 0;
    for (int i = 0; i < a.turns; ++i) sum[i % 2] += a.x[threadIdx.x];
    a.out[threadIdx.x] = sum[0];
}
