// Copies 24 bytes at once, 8 of them past the end of an array.

struct Arguments { const float* x; float* out; };

struct Six { float x[6]; };

extern "C" __global__ void struct_past_the_end(const __grid_constant__ Arguments a) {
    const int i = threadIdx.x * 6;
    const Six six = *reinterpret_cast<const Six*>(a.x + (BROKEN ? i + 2 : i));   // caught here
    *reinterpret_cast<Six*>(a.out + i) = six;           // caught here
}
