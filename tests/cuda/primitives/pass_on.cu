// mbarrier_init, fence_mbarrier_init, mbarrier_arrive and mbarrier_try_wait, on sm_90a: four warps
// in turn, in a ring and so many rounds of it, make each of 32 words x the word 3 x + warp. A warp
// waits for the 32 arrivals of the one before it. Shared memory: 256 bytes.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* y; int rounds; };

extern "C" __global__ void pass_on(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 barriers = shared_address(shared_bytes);
    u32* words = reinterpret_cast<u32*>(shared_bytes + 64);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) mbarrier_init(barriers + i * 8, 32);
        fence_mbarrier_init();
    }
    if (warp == 0) words[lane] = a.x[lane];
    __syncthreads();
    for (int round = 0; round < a.rounds; ++round) {
        const int phase = warp == 0 ? round - 1 : round;
        if (phase >= 0) while (!mbarrier_try_wait(barriers + warp * 8, phase % 2)) {}
        words[lane] = words[lane] * 3 + warp;
        mbarrier_arrive(barriers + (warp + 1) % 4 * 8);
    }
    __syncthreads();
    if (warp == 0) a.y[lane] = words[lane];
}
