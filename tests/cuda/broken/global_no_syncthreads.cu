// Reads another warp's writes to global memory without a barrier.

struct Arguments { const float* x; float* out; float* between; };

extern "C" __global__ void global_no_syncthreads(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x, other = 63 - thread;
    a.between[thread] = a.x[thread];
    if constexpr (!BROKEN) __syncthreads();
    a.out[other] = a.between[other];
}
