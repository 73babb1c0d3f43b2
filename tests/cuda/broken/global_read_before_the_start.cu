// Reads one float before the start of an array.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void global_read_before_the_start(const __grid_constant__ Arguments a) {
    const int i = threadIdx.x;
    a.out[i] = a.x[BROKEN ? i - 1 : i];                         // caught here
}
