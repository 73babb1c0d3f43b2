// Reads one float past the end of shared memory.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_read_past_the_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, next = BROKEN ? thread + 1 : (thread + 1) % 64;
    tile[thread] = a.x[thread];
    __syncthreads();
    a.out[next % 64] = tile[next];                              // caught here
}
