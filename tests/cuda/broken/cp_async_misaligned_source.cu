// Copies 16 bytes from an address aligned to only 4.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_misaligned_source(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int first = threadIdx.x * 4;
    cp_async_16(shared_address(tile + first), a.x + first + (BROKEN ? 1 : 0));   // caught here
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = first; i < first + 4; ++i) a.out[i] = tile[i];
}
