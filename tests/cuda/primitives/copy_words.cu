// cp_async_4: thread i copies word from[i] if bytes[i] is 4, zeros if it is 0, to where ones stand
// in shared memory. After a barrier it reads the word of the thread opposite. One block.
// Shared memory: 4 bytes per thread.
#include "common/ptx.cuh"

struct Arguments { const u32* words; const int* from; const int* bytes; float* out; };

extern "C" __global__ void copy_words(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 start = shared_address(shared_bytes), thread = threadIdx.x;
    const u32 own = start + thread * 4, opposite = start + (blockDim.x - 1 - thread) * 4;
    store_shared(own, 0xFFFFFFFFu);
    __syncthreads();
    cp_async_4(own, a.words + a.from[thread], a.bytes[thread]);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    a.out[thread] = load_shared_float(opposite);
}
