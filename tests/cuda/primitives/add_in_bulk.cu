// bulk_load, bulk_store, bulk_reduce_add, fence_async_proxy_global, store_shared_16,
// load_shared_floats and mbarrier_arrive_if, on sm_90a: each block, of one warp, copies x to shared
// memory and, so many rounds, adds it from there to `sums`. It copies it to its part of `own` too,
// adds it there, and copies that by shared memory to its part of `seen`. Shared memory: 256 bytes.
#include "common/ptx.cuh"

struct Arguments { const float* x; float *sums, *own, *seen; int bytes, rounds; };

extern "C" __global__ void add_in_bulk(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 loaded = shared_address(shared_bytes), added = loaded + 80, barrier = loaded + 160;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 2);
        fence_mbarrier_init();
        mbarrier_arrive_expect(barrier, a.bytes);
        bulk_load(loaded, a.x, barrier, a.bytes);
    }
    __syncthreads();
    mbarrier_arrive_if(threadIdx.x == 5, barrier);
    while (!mbarrier_try_wait(barrier, 0)) {}
    for (int i = threadIdx.x; i < a.bytes / 16; i += 32) {
        float x, y, z, w;
        load_shared_floats(loaded + i * 16, x, y);
        load_shared_floats(loaded + i * 16 + 8, z, w);
        store_shared_16(added + i * 16, x, y, z, w);
    }
    fence_async_proxy();
    __syncthreads();
    for (int i = 0; i < a.rounds && threadIdx.x == 0; ++i) {
        bulk_reduce_add(a.sums, added, a.bytes);
        tma_store_commit();
    }
    float* own = a.own + blockIdx.x * (a.bytes / 4);
    if (threadIdx.x == 0) {
        bulk_store(own, added, a.bytes);
        tma_store_commit();
        tma_store_wait<0>();
        bulk_reduce_add(own, added, a.bytes);
        tma_store_commit();
        tma_store_wait<0>();
        fence_async_proxy_global();
        mbarrier_arrive_expect(barrier, a.bytes);
        bulk_load(loaded, own, barrier, a.bytes);
    }
    mbarrier_arrive_if(threadIdx.x == 5, barrier);
    while (!mbarrier_try_wait(barrier, 1)) {}
    for (int i = threadIdx.x; i < a.bytes / 16; i += 32) {
        float x, y, z, w;
        load_shared_floats(loaded + i * 16, x, y);
        load_shared_floats(loaded + i * 16 + 8, z, w);
        reinterpret_cast<float4*>(a.seen)[blockIdx.x * (a.bytes / 16) + i] =
            make_float4(x, y, z, w);
    }
}
