// A box of 64 columns and ROWS tokens of a tensor x: as it stands in shared memory, undone the
// swizzle, to `seen`; from there by a bulk store to the same place of the tensor y.
// Constants: ROWS. Runs on sm_90a alone.
#include "common/ptx.cuh"

struct Arguments { TensorMap x, y; void* seen; int column, token, head, batch; };

extern "C" __global__ void copy_boxes(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 tile = shared_address(shared_bytes), barrier = tile + ROWS * 128;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(barrier, ROWS * 128);
        tma_load(tile, a.x, barrier, a.column, a.token, a.head, a.batch);
    }
    __syncthreads();
    while (!mbarrier_try_wait(barrier, 0)) {}
    for (int i = threadIdx.x; i < ROWS * 8; i += 32) {
        const int row = i / 8, chunk = i % 8;
        static_cast<uint4*>(a.seen)[i] = load_shared_16(tile + row * 128 + (chunk ^ row % 8) * 16);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(a.y, tile, a.column, a.token, a.head, a.batch);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
}
