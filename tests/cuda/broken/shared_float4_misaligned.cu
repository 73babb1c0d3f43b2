// Reads 16 bytes of shared memory from an odd multiple of 4: rows of 5 floats.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void shared_float4_misaligned(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int row = threadIdx.x * (BROKEN ? 5 : 4);
    for (int i = 0; i < 4; ++i) tile[row + i] = a.x[threadIdx.x * 4 + i];
    const uint4 x = load_shared_16(shared_address(tile + row)); // caught here
    *reinterpret_cast<uint4*>(a.out + threadIdx.x * 4) = x;
}
