// store_shared, load_shared_16 and load_shared_float: thread i stores its four words at index to[i]
// of shared memory, then loads what stands at index i, at once and word by word. Also
// shared_address and opaque: the address of byte i. One block. Shared memory: 16 bytes per thread.
#include "common/ptx.cuh"

struct Arguments { const u32* words; const int* to; uint4* chunks; float* floats; u32* address; };

extern "C" __global__ void move_shared(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 start = shared_address(shared_bytes), thread = threadIdx.x;
    for (int i = 0; i < 4; ++i)
        store_shared(start + a.to[thread] * 16 + i * 4, a.words[thread * 4 + i]);
    __syncthreads();
    a.chunks[thread] = load_shared_16(start + thread * 16);
    for (int i = 0; i < 4; ++i)
        a.floats[thread * 4 + i] = load_shared_float(start + thread * 16 + i * 4);
    a.address[thread] = opaque(shared_address(shared_bytes + thread)) - start;
}
