// bulk_reduce_add_s32 and reduce_add_s32, on sm_90a: each block, of one warp, rounds x to integers
// in shared memory (__float2int_rn) and adds them, so many rounds, in bulk to `sums` and one by one
// to `others`. Shared memory: 128 bytes.
#include "common/ptx.cuh"

struct Arguments { const float* x; int* sums; int* others; int rounds; };

extern "C" __global__ void add_integers(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int lane = threadIdx.x, x = __float2int_rn(a.x[lane]);
    reinterpret_cast<int*>(shared_bytes)[lane] = x;
    fence_async_proxy();
    __syncthreads();
    for (int i = 0; i < a.rounds; ++i) {
        reduce_add_s32(a.others + lane, x);
        if (lane != 0) continue;
        bulk_reduce_add_s32(a.sums, shared_address(shared_bytes), 128);
        tma_store_commit();
    }
    if (lane == 0) tma_store_wait_read<0>();
}
