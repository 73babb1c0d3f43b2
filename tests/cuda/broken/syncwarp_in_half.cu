// Half of the lanes in a mask never arrive.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void syncwarp_in_half(const __grid_constant__ Arguments a) {
    const int thread = threadIdx.x;
    a.out[thread] = a.x[thread];
    if (!BROKEN || thread % 2 == 0) __syncwarp();               // caught here
}
