// Accumulates in shared memory that was never cleared.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_never_written(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    if constexpr (!BROKEN) tile[thread] = 0;
    tile[thread] += a.x[thread];                                // caught here
    a.out[thread] = tile[thread];
}
