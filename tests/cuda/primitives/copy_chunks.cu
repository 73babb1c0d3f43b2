// cp_async_16, or cp_async_16_partly if PARTLY: thread i copies chunk from[i] of 16 bytes, or the
// first bytes[i] of them, to where ones stand in shared memory. After a barrier it reads the chunk
// of the thread opposite. One block. Constants: PARTLY. Shared memory: 16 bytes per thread.
#include "common/ptx.cuh"

struct Arguments { const uint4* chunks; const int* from; const int* bytes; uint4* out; };

extern "C" __global__ void copy_chunks(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 start = shared_address(shared_bytes), thread = threadIdx.x;
    const u32 own = start + thread * 16, opposite = start + (blockDim.x - 1 - thread) * 16;
    for (int i = 0; i < 4; ++i) store_shared(own + i * 4, 0xFFFFFFFFu);
    __syncthreads();
    if constexpr (PARTLY) cp_async_16_partly(own, a.chunks + a.from[thread], a.bytes[thread]);
    else cp_async_16(own, a.chunks + a.from[thread]);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    a.out[thread] = load_shared_16(opposite);
}
