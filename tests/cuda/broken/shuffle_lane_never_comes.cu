// A shuffle among all lanes of a warp, in a branch that half of them take.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shuffle_lane_never_comes(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    float x = a.x[thread ^ 1];
    if (!BROKEN || thread < 48)
        x = __shfl_xor_sync(0xFFFFFFFFu, a.x[thread], 1);       // caught here
    a.out[thread ^ 1] = x;
}
