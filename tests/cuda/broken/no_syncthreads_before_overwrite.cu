// Overwrites data that another warp may still read.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void no_syncthreads_before_overwrite(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = 63 - thread;
    for (int i = 0; i < 128; i += 64) {
        tile[thread] = a.x[i + thread];                         // caught here
        __syncthreads();
        a.out[i + other] = tile[other];                         // caught here
        if constexpr (!BROKEN) __syncthreads();
    }
}
