// cp_async_commit and cp_async_wait: every thread copies three chunks of 16 bytes, the first in one
// group, then a group of nothing, then the two others in one group. It reads each chunk as early as
// the waits allow. One block. Shared memory: 48 bytes per thread.
#include "common/ptx.cuh"

struct Arguments { const uint4* chunks; uint4* out; };

extern "C" __global__ void copy_groups(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const u32 own = shared_address(shared_bytes) + threadIdx.x * 48;
    const uint4* from = a.chunks + threadIdx.x * 3;
    uint4* out = a.out + threadIdx.x * 3;
    cp_async_16(own, from);
    cp_async_commit();
    cp_async_commit();
    cp_async_16(own + 16, from + 1);
    cp_async_16(own + 32, from + 2);
    cp_async_commit();
    cp_async_wait<2>();
    out[0] = load_shared_16(own);
    cp_async_wait<0>();
    out[1] = load_shared_16(own + 16);
    out[2] = load_shared_16(own + 32);
}
