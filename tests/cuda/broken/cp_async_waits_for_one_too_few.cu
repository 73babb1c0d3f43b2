// Waits for the older of two groups of copies and reads both.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_waits_for_one_too_few(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    for (int i = thread; i < 128; i += 64) {
        cp_async_4(shared_address(tile + i), a.x + i, 4);
        cp_async_commit();
    }
    cp_async_wait<BROKEN ? 1 : 0>();
    for (int i = thread; i < 128; i += 64)
        a.out[i] = tile[i];                                     // caught here
}
