// ldmatrix_x4: one warp. `words` are 32 rows of 16 bytes, which go to shared memory as they are.
// Lane l gives the address of row rows[l]; its four registers become out[l].
// Constants: TRANSPOSED. Shared memory: 512 bytes.
#include "common/ptx.cuh"

struct Arguments { const u32* words; const int* rows; u32* out; };

extern "C" __global__ void load_matrices(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 start = shared_address(shared_bytes), lane = threadIdx.x;
    for (int i = lane; i < 128; i += 32) store_shared(start + i * 4, a.words[i]);
    __syncwarp();
    u32 r[4];
    const u32 row = start + a.rows[lane] * 16;
    if constexpr (TRANSPOSED) ldmatrix_x4_transposed(r, row);
    else ldmatrix_x4(r, row);
    for (int i = 0; i < 4; ++i) a.out[lane * 4 + i] = r[i];
}
