// atomicAdd: thread i adds x[i] to the number at index to[i], and keeps what stood there.
// Constants: T.
#include "common/ptx.cuh"

struct Arguments { const T* x; const int* to; T* sums; T* before; };

extern "C" __global__ void add_atomically(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.before[i] = atomicAdd(a.sums + a.to[i], a.x[i]);
}
