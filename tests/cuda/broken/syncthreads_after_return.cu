// A barrier of the threads that have work, after the others have exited.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void syncthreads_after_return(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    if (BROKEN && thread >= 40) return;
    a.out[thread] = a.x[thread];
    __syncthreads();                                            // caught here
}
