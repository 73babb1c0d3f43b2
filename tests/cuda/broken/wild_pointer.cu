// Reads terabytes away from all arrays: a product of 64 bits too many.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void wild_pointer(const __grid_constant__ Arguments a) {
    const i64 i = threadIdx.x;
    a.out[i] = a.x[BROKEN ? i + (i64(1) << 44) : i];            // caught here
}
