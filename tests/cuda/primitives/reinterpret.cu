// __int_as_float, __uint_as_float, __float_as_int and __float_as_uint: one number per thread.
#include "common/ptx.cuh"

struct Arguments { const u32* bits; float* of_int; float* of_uint; int* to_int; u32* to_uint; };

extern "C" __global__ void reinterpret(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.of_int[i] = __int_as_float(static_cast<int>(a.bits[i]));
    a.of_uint[i] = __uint_as_float(a.bits[i]);
    a.to_int[i] = __float_as_int(a.of_int[i]);
    a.to_uint[i] = __float_as_uint(a.of_int[i]);
}
