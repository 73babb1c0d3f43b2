// Adds to one float past the end of an array.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void atomic_past_the_end(const __grid_constant__ Arguments a) {
    const int i = threadIdx.x + (BROKEN ? 1 : 0);
    a.out[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(a.out + i, a.x[threadIdx.x]);                     // caught here
}
