// On sm_90a: a thread waits for a phase when the next one, too, is over.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* out; };

extern "C" __global__ void mbarrier_phase_missed(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 barrier = shared_address(shared_bytes);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        for (int i = 0; i < (BROKEN ? 2 : 1); ++i) mbarrier_arrive(barrier);
    }
    __syncthreads();
    while (!mbarrier_try_wait(barrier, 0)) {}                   // caught here
    a.out[threadIdx.x] = a.x[threadIdx.x];
}
