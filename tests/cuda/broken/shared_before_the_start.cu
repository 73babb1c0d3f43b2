// Reads one float before the start of shared memory.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_before_the_start(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    tile[thread] = a.x[thread];
    a.out[thread] = tile[BROKEN && thread == 0 ? -1 : thread];  // caught here
}
