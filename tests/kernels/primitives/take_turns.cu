// load_acquire, store_release and __threadfence: block b waits until the turn, at first 0, is b. It
// makes each value x, one a thread, 3 x + b, and passes the turn on.
#include "ptx.cuh"

struct Arguments { int* turn; u32* values; };

extern "C" __global__ void take_turns(const __grid_constant__ Arguments a) {
    const int own = blockIdx.x;
    if (threadIdx.x == 0) while (load_acquire(a.turn) != own) {}
    __syncthreads();
    a.values[threadIdx.x] = a.values[threadIdx.x] * 3 + own;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) store_release(a.turn, own + 1);
}
