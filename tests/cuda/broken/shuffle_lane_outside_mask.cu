// A lane executes a shuffle whose mask does not include it.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shuffle_lane_outside_mask(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    const unsigned mask = BROKEN ? 0x7FFFFFFFu : 0xFFFFFFFFu;
    a.out[thread ^ 1] = __shfl_xor_sync(mask, a.x[thread], 1);  // caught here
}
