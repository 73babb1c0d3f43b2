// On sm_90a: a block sends another its words and ends, perhaps before they have been read.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_copy_under_way_at_the_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    float* words = reinterpret_cast<float*>(of_block(shared_bytes) + 64);
    const u32 source = shared_address(words), full = source - 64;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        if (cluster_rank() == 1) mbarrier_arrive_expect(full, 256);
    }
    cluster_sync();
    if (cluster_rank() == 0 && threadIdx.x == 0) {
        for (int i = 0; i < 64; ++i) words[i] = a.x[i];
        fence_async_proxy();
        const u32 target = shared_of_rank(source, 1), arrived = shared_of_rank(full, 1);
        copy_to_block(target, source, arrived, 256);            // caught here
    }
    if (cluster_rank() == 1) {
        while (!mbarrier_try_wait(full, 0)) {}
        for (int i = threadIdx.x; i < 64; i += 32) a.out[i] = words[i];
    }
    if (!BROKEN) cluster_sync();
}
