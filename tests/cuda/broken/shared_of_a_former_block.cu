// Block 0 fills shared memory; the other blocks read it unwritten.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_of_a_former_block(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    if (!BROKEN || blockIdx.x == 0) tile[thread] = a.x[thread];
    __syncthreads();
    a.out[blockIdx.x * 64 + thread] = tile[63 - thread];        // caught here
}
