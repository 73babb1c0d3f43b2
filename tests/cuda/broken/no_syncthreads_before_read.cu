// Reads another warp's writes without a barrier.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void no_syncthreads_before_read(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = 63 - thread;
    tile[thread] = a.x[thread];                                 // caught here
    if constexpr (!BROKEN) __syncthreads();
    a.out[other] = tile[other];                                 // caught here
}
