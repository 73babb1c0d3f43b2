// float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7F is NaN.
#pragma once
#include "common/types.cuh"

// The number in the upper byte of a word, exactly. The other bytes are ignored.
__device__ __forceinline__ float float8_to_float(u32 word) {
    // The fields, moved to a float's: 2^120 too small, as its bias is 127. Exact, subnormal
    // numbers as well.
    const u32 magnitude = word >> 4 & 0x07F00000u;
    constexpr float SCALE = 1.329227995784916e36f;          // 2^120
    const float x = __uint_as_float(word & 0x80000000u | magnitude) * SCALE;
    return magnitude == 0x07F00000u ? __uint_as_float(0x7FC00000u) : x;
}
