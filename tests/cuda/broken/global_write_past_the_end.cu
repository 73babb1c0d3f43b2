// Writes one float past the end of an array.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void global_write_past_the_end(const __grid_constant__ Arguments a) {
    a.out[threadIdx.x + (BROKEN ? 1 : 0)] = a.x[threadIdx.x];   // caught here
}
