// float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7F is NaN.
#pragma once
#include "common/types.cuh"

// The number in the upper byte of a word, exactly. The other bytes are ignored.
__device__ __forceinline__ float float8_to_float(u32 word) {
    // The fields, moved to a float's: 2^120 too small, as its bias is 127. Exact, subnormal
    // numbers as well.
    const u32 magnitude = word >> 4 & 0x07F00000u;
    constexpr float SCALE = 1.329227995784916e36f;          // 2^120
    const float x = __uint_as_float((word & 0x80000000u) | magnitude) * SCALE;
    return magnitude == 0x07F00000u ? __uint_as_float(0x7FC00000u) : x;
}

// The number nearest to x, to even if two are; 448 with x's sign if that exceeds it.
__device__ __forceinline__ u8 float_to_float8(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return static_cast<u8>(sign | 0x7F);
    const float magnitude = fminf(fabsf(x), 448.0f);
    if (magnitude < 0.015625f)                              // 2^-6: multiples of 2^-9; to integers
        return static_cast<u8>(sign | (__float_as_uint(fmaf(magnitude, 512.0f, 8388608.0f)) & 0xF));
    const u32 bits = __float_as_uint(magnitude);
    const u32 rounded = bits + 0x7FFFF + (bits >> 20 & 1);
    return static_cast<u8>(sign | ((rounded >> 20) - (120 << 3)));
}
