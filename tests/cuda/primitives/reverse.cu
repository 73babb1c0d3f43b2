// __syncthreads, or __syncwarp if WARP: the words of the block, or of each warp, in reverse, by way
// of shared memory. One block. Constants: WARP. Shared memory: 4 bytes per thread.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* y; };

extern "C" __global__ void reverse(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    u32* words = reinterpret_cast<u32*>(shared_bytes);
    words[threadIdx.x] = a.x[threadIdx.x];
    if constexpr (WARP) __syncwarp();
    else __syncthreads();
    a.y[threadIdx.x] = words[WARP ? threadIdx.x ^ 31 : blockDim.x - 1 - threadIdx.x];
}
