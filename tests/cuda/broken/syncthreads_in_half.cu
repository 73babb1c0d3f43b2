// Half of the threads skip a barrier and wait at the next.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void syncthreads_in_half(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x, other = 63 - thread;
    tile[thread] = a.x[thread];
    if (!BROKEN || thread < 32) __syncthreads();                // caught here
    const float x = tile[BROKEN ? thread : other];
    __syncthreads();                                            // caught here
    a.out[BROKEN ? thread : other] = x;
}
