// On sm_90a: a block of a cluster writes to the shared memory of the next, by a pointer.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_into_the_next_block(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    float* words = reinterpret_cast<float*>(of_block(shared_bytes));
    const int i = cluster_rank() * 32 + threadIdx.x;
    float* to = words + (BROKEN && cluster_rank() == 0 ? 256 : 0);
    to[threadIdx.x] = a.x[i];                                   // caught here
    a.out[i] = to[threadIdx.x];
    cluster_sync();
}
