// A shuffle synchronises lanes, but does not order memory.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shuffle_for_syncwarp(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = thread ^ 1;
    tile[thread] = a.x[thread];                                 // caught here
    if constexpr (BROKEN) __shfl_xor_sync(0xFFFFFFFFu, thread, 1);
    else __syncwarp();
    a.out[other] = tile[other];                                 // caught here
}
