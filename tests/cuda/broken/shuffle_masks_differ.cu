// Half of the lanes pass a mask of the whole warp, the others of their half.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shuffle_masks_differ(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    const unsigned mask = BROKEN && thread % 32 >= 16 ? 0xFFFF0000u : 0xFFFFFFFFu;
    a.out[thread ^ 1] = __shfl_xor_sync(mask, a.x[thread], 1);  // caught here
}
