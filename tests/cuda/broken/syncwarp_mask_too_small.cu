// Half of a warp synchronises, then reads the other half's writes.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void syncwarp_mask_too_small(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = thread ^ (BROKEN ? 16 : 1);
    tile[thread] = a.x[thread];                                 // caught here
    __syncwarp(thread % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u);
    a.out[other] = tile[other];                                 // caught here
}
