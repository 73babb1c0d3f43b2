// The two halves of the block wait at different barriers.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void syncthreads_in_two_branches(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    if (BROKEN && thread % 2 == 0) {
        a.out[thread] = a.x[thread];
        __syncthreads();                                        // caught here
    } else {
        a.out[thread] = a.x[thread];
        __syncthreads();                                        // caught here
    }
}
