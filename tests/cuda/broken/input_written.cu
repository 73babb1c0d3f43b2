// Writes to an array that the kernel only reads.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void input_written(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    const float x = a.x[thread];
    if constexpr (BROKEN) const_cast<float*>(a.x)[thread] = 0;  // caught here
    a.out[thread] = x;
}
