// Copies 16 bytes to an address aligned to only 8: rows of 6 floats.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void cp_async_misaligned_target(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int row = threadIdx.x * (BROKEN ? 6 : 8);
    cp_async_16(shared_address(tile + row), a.x + threadIdx.x * 4);     // caught here
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = 0; i < 4; ++i) a.out[threadIdx.x * 4 + i] = tile[row + i];
}
