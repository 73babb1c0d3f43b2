// tma_store_wait, on sm_90a: a thread adds the four floats of x to `sums` by bulk_reduce_add, and
// takes what it sees there to `seen`: after the addition, if `wait`, else after its source was
// read. Shared memory: 64 bytes.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* sums; float* seen; int wait; };

extern "C" __global__ void add_and_look(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 added = shared_address(shared_bytes);
    if (threadIdx.x != 0) return;
    store_shared_16(added, a.x[0], a.x[1], a.x[2], a.x[3]);
    fence_async_proxy();
    bulk_reduce_add(a.sums, added, 16);
    tma_store_commit();
    if (a.wait != 0) tma_store_wait<0>();
    else tma_store_wait_read<0>();
    for (int i = 0; i < 4; ++i) a.seen[i] = *static_cast<volatile float*>(a.sums + i);
}
