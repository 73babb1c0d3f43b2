// On sm_90a: treats a wait that timed out as a completed one.
#include "common/ptx.cuh"

struct Arguments { TensorMap x; u32* out; };

extern "C" __global__ void mbarrier_waits_once(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32* tile = reinterpret_cast<const u32*>(shared_bytes);
    const u32 target = shared_address(tile), barrier = target + 1024;
    const int thread = threadIdx.x;
    if (thread == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(barrier, 1024);
        tma_load(target, a.x, barrier, 0, 0, 0, 0);
    }
    __syncthreads();
    if constexpr (BROKEN) mbarrier_try_wait(barrier, 0);
    else while (!mbarrier_try_wait(barrier, 0)) {}
    // Eight rows of 64 elements, their 16-byte chunks swizzled.
    for (int i = thread; i < 256; i += 64)
        a.out[i] = tile[i / 32 * 32 + (i / 4 % 8 ^ i / 32) * 4 + i % 4];    // caught here
}
