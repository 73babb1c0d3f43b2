// Reads 16 bytes of global memory from an odd multiple of 4.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void float4_misaligned(const __grid_constant__ Arguments a) {
    const int i = threadIdx.x * 4;
    const float* from = a.x + (BROKEN && i == 0 ? 1 : i);
    const float4 x = *reinterpret_cast<const float4*>(from);    // caught here
    a.out[i] = x.x, a.out[i + 1] = x.y, a.out[i + 2] = x.z, a.out[i + 3] = x.w;
}
