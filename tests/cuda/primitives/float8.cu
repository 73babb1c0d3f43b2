// Every float8_e4m3fn number as both types of element, four a thread, and whether it is NaN; and
// floats as float8 numbers.
#include "common/float8.cuh"
#include "decode/float8.cuh"

struct Arguments {
    const u32* words;
    const float* x;
    u32 *float16s, *by_bits, *bfloat16s, *nan;
    float* floats;
    u8* rounded;
};

extern "C" __global__ void float8(const __grid_constant__ Arguments all) {
    const int i = threadIdx.x;
    const u32 word = all.words[i];
    u32 pairs[2], by_bits[2];
    float8_to_float16<false>(by_bits, word);
    if constexpr (CONVERTS_FLOAT8) e4m3_to_float16(pairs, word);
    else float8_to_float16(pairs, word);
    for (int j = 0; j < 2; ++j) {
        all.float16s[i * 2 + j] = pairs[j];
        all.by_bits[i * 2 + j] = by_bits[j];
        all.bfloat16s[i * 2 + j] = to_elements<bfloat16>(pairs[j]);
    }
    all.nan[i] = nan_signs(word);
    for (int j = 0; j < 4; ++j) all.floats[i * 4 + j] = float8_to_float(word << (24 - j * 8));
    for (int j = i; j < 4096; j += 64) all.rounded[j] = float_to_float8(all.x[j]);
}
