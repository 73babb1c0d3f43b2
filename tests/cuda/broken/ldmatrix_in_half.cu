// Only half of a warp executes ldmatrix.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void ldmatrix_in_half(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int lane = threadIdx.x;
    for (int i = 0; i < 4; ++i) tile[4 * lane + i] = a.x[4 * lane + i];
    __syncwarp();

    u32 r[4] = {0, 0, 0, 0};
    if (!BROKEN || lane < 16) ldmatrix_x4(r, shared_address(tile + 4 * lane));   // caught here

    for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(a.out)[32 * i + lane] = r[i];
}
