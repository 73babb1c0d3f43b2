// Reads one float past the end of an array.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void global_read_past_the_end(const __grid_constant__ Arguments a) {
    a.out[threadIdx.x] = a.x[threadIdx.x + (BROKEN ? 1 : 0)];   // caught here
}
