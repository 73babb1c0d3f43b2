// Every float8_e4m3fn number as both types of element, four a thread; and floats as float8 numbers.
#include "common/float8.cuh"
#include "decode/float8.cuh"

struct Arguments {
    const u32* words;
    const float* x;
    u32 *float16s, *bfloat16s;
    float* floats;
    u8* rounded;
};

extern "C" __global__ void float8(const __grid_constant__ Arguments all) {
    const int i = threadIdx.x;
    u32 pairs[2];
    convert_word<float16>(all.words[i], pairs);
    for (int j = 0; j < 2; ++j) all.float16s[i * 2 + j] = pairs[j];
    convert_word<bfloat16>(all.words[i], pairs);
    for (int j = 0; j < 2; ++j) all.bfloat16s[i * 2 + j] = pairs[j];
    for (int j = 0; j < 4; ++j)
        all.floats[i * 4 + j] = float8_to_float(all.words[i] << (24 - j * 8));
    for (int j = i; j < 4096; j += 64) all.rounded[j] = float_to_float8(all.x[j]);
}
