// Writes one float before the start of shared memory.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_written_before_the_start(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int i = static_cast<int>(threadIdx.x) - (BROKEN ? 1 : 0);
    tile[i] = a.x[threadIdx.x];                                 // caught here
    a.out[threadIdx.x] = tile[i];
}
