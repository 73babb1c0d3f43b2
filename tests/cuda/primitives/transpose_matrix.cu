// movmatrix_transposed: one warp, of which lane l gives pairs[l] and gets out[l].
#include "common/ptx.cuh"

struct Arguments { const u32* pairs; u32* out; };

extern "C" __global__ void transpose_matrix(const __grid_constant__ Arguments a) {
    a.out[threadIdx.x] = movmatrix_transposed(a.pairs[threadIdx.x]);
}
