// of_block, cluster_rank, shared_of_rank, cluster_sync, copy_to_block and, in odd rounds,
// copy_to_block_if, mbarrier_arrive_expect_if, mbarrier_arrive_in_cluster_if, on sm_90a: each of
// two blocks sends 512 bytes of x to the other, which stores them to y, as many times as there
// are rounds. Shared memory: 1,088 bytes.
// Constants: CLUSTER_BLOCKS.
#include "common/ptx.cuh"

struct Arguments { const u32* x; u32* y; int rounds; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_exchange(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    u32* words = reinterpret_cast<u32*>(of_block(shared_bytes) + 64);
    const u32 full = shared_address(words) - 64, empty = full + 8, own = full + 64;
    const u32 received = own + 512, peer = cluster_rank() ^ 1;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 1);
        fence_mbarrier_init();
    }
    cluster_sync();
    for (int round = 0; round < a.rounds; ++round) {
        const int first = (blockIdx.x * a.rounds + round) * 128;
        while (!mbarrier_try_wait(empty, round % 2 ^ 1)) {}
        for (int i = threadIdx.x; i < 128; i += 32) words[i] = a.x[first + i];
        fence_async_proxy();
        __syncwarp();
        const u32 to = shared_of_rank(received, peer), its_full = shared_of_rank(full, peer);
        const bool sends = threadIdx.x == 0;
        if (round % 2 == 0 && sends) {
            mbarrier_arrive_expect(full, 512);
            copy_to_block(to, own, its_full, 512);
        } else {
            mbarrier_arrive_expect_if(round % 2 == 1 && sends, full, 512);
            copy_to_block_if(round % 2 == 1 && sends, to, own, its_full, 512);
        }
        __syncwarp();
        while (!mbarrier_try_wait(full, round % 2)) {}
        for (int i = threadIdx.x; i < 128; i += 32) a.y[first + i] = words[128 + i];
        __syncwarp();
        mbarrier_arrive_in_cluster_if(threadIdx.x == 0, shared_of_rank(empty, peer));
    }
    cluster_sync();
}
