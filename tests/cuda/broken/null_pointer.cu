// Writes to an optional array without checking for null.

struct Arguments { const float* x; float* out; float* lse; };

extern "C" __global__ void null_pointer(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    if (BROKEN || a.lse != nullptr) a.lse[thread] = 0;          // caught here
    a.out[thread] = a.x[thread];
}
