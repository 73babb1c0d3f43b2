// A barrier in a loop that one warp leaves an iteration earlier.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void syncthreads_in_uneven_loop(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x, end = BROKEN && thread < 32 ? 64 : 128;
    for (int i = thread; i < end; i += 64) {
        a.out[i] = a.x[i];
        __syncthreads();                                        // caught here
    }
}
