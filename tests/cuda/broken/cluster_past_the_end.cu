// On sm_90a: blocks of a cluster write past the end of their shared memory.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS)
cluster_past_the_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    float* words = reinterpret_cast<float*>(of_block(shared_bytes));
    const int i = cluster_rank() * 32 + threadIdx.x;
    const int past = BROKEN ? 80 : 0;                           // of 80 words
    words[past + threadIdx.x] = a.x[i];                         // caught here
    a.out[i] = words[past + threadIdx.x];
}
