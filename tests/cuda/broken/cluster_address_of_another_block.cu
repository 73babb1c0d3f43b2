// On sm_90a: a store that takes addresses of its own block gets another block's.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_address_of_another_block(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    float* words = reinterpret_cast<float*>(of_block(shared_bytes));
    const int i = cluster_rank() * 32 + threadIdx.x;
    const u32 own = shared_address(words + threadIdx.x);
    const u32 at = BROKEN ? shared_of_rank(own, cluster_rank() ^ 1) : own;
    store_shared(at, __float_as_uint(a.x[i]));                  // caught here
    cluster_sync();
    a.out[i] = words[threadIdx.x];
}
