// Every lane writes the row that it passes to ldmatrix, but receives parts of all rows.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void ldmatrix_no_syncwarp_own_row(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int lane = threadIdx.x;
    for (int i = 0; i < 4; ++i) tile[4 * lane + i] = a.x[4 * lane + i];         // caught here
    if constexpr (!BROKEN) __syncwarp();
    u32 r[4];
    ldmatrix_x4(r, shared_address(tile + 4 * lane));            // caught here

    for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(a.out)[32 * i + lane] = r[i];
}
