// stmatrix_x4, on sm_90a, and store_shared of 2 bytes: one warp. Lane l gives its four registers
// and the address of row rows[l] of shared memory, where 32 rows of 16 bytes stand and then the
// lanes' elements: all that goes to `out`. Shared memory: 576 bytes.
#include "common/ptx.cuh"

struct Arguments { const u32* r; const int* rows; const u16* elements; u32* out; };

extern "C" __global__ void store_matrices(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 start = shared_address(shared_bytes), lane = threadIdx.x;
    const u32* r = a.r + lane * 4;
    stmatrix_x4(start + a.rows[lane] * 16, r[0], r[1], r[2], r[3]);
    store_shared(start + 512 + lane * 2, a.elements[lane]);
    __syncwarp();
    for (int i = lane; i < 144; i += 32) a.out[i] = reinterpret_cast<u32*>(shared_bytes)[i];
}
