// Two warps write to one word: which of them comes last is open.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void two_warps_write_one_word(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    tile[BROKEN ? thread % 32 : thread] = a.x[thread];          // caught here
    __syncthreads();
    a.out[thread] = tile[thread];
}
