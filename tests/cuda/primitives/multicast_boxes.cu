// tma_load_multicast, on sm_90a: each of two blocks loads a box of 64 columns and ROWS tokens of x
// to both; each stores both boxes, undone the swizzle, to its part of `seen`.
// Constants: ROWS, CLUSTER_BLOCKS.
#include "common/ptx.cuh"

struct Arguments { TensorMap x; void* seen; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
multicast_boxes(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    constexpr int BYTES = ROWS * 128;
    const u32 tiles = shared_address(of_block(shared_bytes)), barrier = tiles + 2 * BYTES;
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(barrier, 2 * BYTES);
    }
    cluster_sync();
    if (threadIdx.x == 0) tma_load_multicast(tiles + rank * BYTES, a.x, barrier, 3, 0, 0, rank, 0);
    while (!mbarrier_try_wait(barrier, 0)) {}
    for (int i = threadIdx.x; i < ROWS * 16; i += 32) {
        const int row = i / 8, chunk = i % 8;
        static_cast<uint4*>(a.seen)[rank * ROWS * 16 + i] =
            load_shared_16(tiles + row * 128 + (chunk ^ row % 8) * 16);
    }
    cluster_sync();
}
