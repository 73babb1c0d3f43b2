// Every float8_e4m3fn number as both types of element, four a thread, and whether it is NaN; and
// floats as float8 numbers.
#include "common/float8.cuh"
#include "decode/float8.cuh"

struct Arguments {
    const u32* words;
    const float* x;
    u32 *float16s, *bfloat16s, *carries;
    float* floats;
    u8* rounded;
};

extern "C" __global__ void float8(const __grid_constant__ Arguments all) {
    const int i = threadIdx.x;
    const u32 word = all.words[i];
    all.float16s[i * 2] = even_elements<float16>(word);
    all.float16s[i * 2 + 1] = odd_elements<float16>(word);
    all.bfloat16s[i * 2] = even_elements<bfloat16>(word);
    all.bfloat16s[i * 2 + 1] = odd_elements<bfloat16>(word);
    all.carries[i] = nan_carries(word);
    for (int j = 0; j < 4; ++j)
        all.floats[i * 4 + j] = float8_to_float(word << (24 - j * 8));
    for (int j = i; j < 4096; j += 64) all.rounded[j] = float_to_float8(all.x[j]);
}
