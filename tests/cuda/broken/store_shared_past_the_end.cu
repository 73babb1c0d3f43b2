// Writes past the end of shared memory by address, not by pointer.
#include "common/ptx.cuh"

struct Arguments { const float* x; float* out; };

extern "C" __global__ void store_shared_past_the_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    float* tile = reinterpret_cast<float*>(shared_bytes);
    const int thread = threadIdx.x;
    const u32 address = shared_address(tile) + (thread + (BROKEN ? 1 : 0)) * 4;
    store_shared(address, __float_as_uint(a.x[thread]));        // caught here
    a.out[thread] = load_shared_float(address);
}
