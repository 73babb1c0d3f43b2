// On sm_90a: a block arrives at an mbarrier of another block, which may have ended.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_block_has_ended(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    float* words = reinterpret_cast<float*>(of_block(shared_bytes));
    const int i = cluster_rank() * 32 + threadIdx.x;
    const u32 done = shared_address(words + 64);
    if (threadIdx.x == 0) {
        mbarrier_init(done, 1);
        fence_mbarrier_init();
    }
    cluster_sync();
    a.out[i] = a.x[i];
    const bool arrives = cluster_rank() == 0 && threadIdx.x == 0;
    mbarrier_arrive_in_cluster_if(arrives, shared_of_rank(done, 1));        // caught here
    if (!BROKEN) cluster_sync();
}
