// Each half of a warp shuffles separately, but reads values of the other.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shuffle_partner_outside_mask(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x, distance = BROKEN ? 16 : 8;
    const unsigned mask = thread % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u;
    a.out[thread ^ distance] = __shfl_xor_sync(mask, a.x[thread], distance);
}
