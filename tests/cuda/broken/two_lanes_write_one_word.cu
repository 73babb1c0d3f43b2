// Two lanes write different values to one word.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void two_lanes_write_one_word(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    tile[BROKEN ? thread / 2 : thread] = a.x[thread];           // caught here
    __syncwarp();
    a.out[thread] = tile[thread];
}
