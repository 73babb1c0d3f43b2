// Writes one float past the end of shared memory.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_write_past_the_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int i = threadIdx.x + (BROKEN ? 1 : 0);
    tile[i] = a.x[threadIdx.x];                                 // caught here
    a.out[threadIdx.x] = tile[i];
}
