// cp_async_mbarrier_arrive, on sm_90a: a warp copies two chunks of 16 bytes a lane and arrives
// after each; another waits for each and reads what the opposite lane has copied. Shared memory:
// 1,088 bytes.
#include "common/ptx.cuh"

struct Arguments { const uint4* chunks; uint4* out; };

extern "C" __global__ void copies_arrive(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 barriers = shared_address(shared_bytes), own = barriers + 64 + threadIdx.x % 32 * 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) mbarrier_init(barriers + i * 8, 32);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 2; ++i) {
        if (threadIdx.x < 32) {
            cp_async_16(own + i * 16, a.chunks + lane * 2 + i);
            cp_async_mbarrier_arrive(barriers + i * 8);
        } else {
            while (!mbarrier_try_wait(barriers + i * 8, 0)) {}
            const int other = (31 - lane) * 2 + i;
            a.out[other] = load_shared_16(barriers + 64 + other * 16);
        }
    }
}
