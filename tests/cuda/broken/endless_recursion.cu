// Recurses until the stack is full.

struct Arguments { const float* x; float* out; };

__device__ float below(float x, int depth) {
    volatile float room[100];
    room[depth & 63] = x;
    return depth == 0 ? x : below(x, depth - 1) + 0 * room[depth & 63];
}

extern "C" __global__ void endless_recursion(const __grid_constant__ Arguments a) {
    a.out[threadIdx.x] = below(a.x[threadIdx.x], BROKEN ? -1 : 3);
}
