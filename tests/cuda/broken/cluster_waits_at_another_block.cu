// On sm_90a: a thread waits at an mbarrier of another block.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_waits_at_another_block(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    float* words = reinterpret_cast<float*>(of_block(shared_bytes));
    const int i = cluster_rank() * 32 + threadIdx.x;
    const u32 full = shared_address(words + 64);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        mbarrier_arrive(full);
    }
    cluster_sync();
    const u32 awaited = BROKEN ? shared_of_rank(full, cluster_rank() ^ 1) : full;
    while (!mbarrier_try_wait(awaited, 0)) {}                   // caught here
    a.out[i] = a.x[i];
    cluster_sync();
}
