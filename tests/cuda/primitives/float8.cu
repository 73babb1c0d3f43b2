// Every float8_e4m3fn number as an element, four a thread; and floats as float8 numbers.
#include "common/float8.cuh"
#include "decode/float8.cuh"

struct Arguments { const u32* words; const float* x; u32* elements; float* floats; u8* rounded; };

extern "C" __global__ void float8(const __grid_constant__ Arguments all) {
    const int i = threadIdx.x;
    u32 pairs[2];
    convert_word(all.words[i], pairs);
    all.elements[i * 2] = pairs[0];
    all.elements[i * 2 + 1] = pairs[1];
    for (int j = 0; j < 4; ++j)
        all.floats[i * 4 + j] = float8_to_float(all.words[i] << (24 - j * 8));
    for (int j = i; j < 4096; j += 64) all.rounded[j] = float_to_float8(all.x[j]);
}
