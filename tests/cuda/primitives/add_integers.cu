// bulk_reduce_add_s32 and reduce_add_u64, on sm_90a: each block, of one warp, rounds x to integers
// in shared memory (__float2int_rn) and adds them, so many rounds, in bulk to `sums`; lane i < 4
// adds pairs[i] to pair_sums[i]. Shared memory: 128 bytes.
#include "common/ptx.cuh"

struct Arguments { const float* x; const u64* pairs; int* sums; u64* pair_sums; int rounds; };

extern "C" __global__ void add_integers(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int lane = threadIdx.x;
    reinterpret_cast<int*>(shared_bytes)[lane] = __float2int_rn(a.x[lane]);
    fence_async_proxy();
    __syncthreads();
    for (int i = 0; i < a.rounds && lane == 0; ++i) {
        bulk_reduce_add_s32(a.sums, shared_address(shared_bytes), 128);
        tma_store_commit();
    }
    for (int i = 0; i < a.rounds && lane < 4; ++i) reduce_add_u64(a.pair_sums + lane, a.pairs[lane]);
    if (lane == 0) tma_store_wait_read<0>();
}
