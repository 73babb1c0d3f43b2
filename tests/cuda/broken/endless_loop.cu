// Waits for a change of memory in a loop that yields to no other thread.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void endless_loop(const __grid_constant__ Arguments a) {
    const volatile float* x = a.x;
    while (BROKEN && x[0] == 0) {}
    a.out[threadIdx.x] = x[threadIdx.x];
}
