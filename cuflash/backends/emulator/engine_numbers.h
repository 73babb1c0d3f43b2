// Numbers of 16 bits. A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float value_of_float16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    if (exponent == 31) return float_of(sign | 0x7F800000u | fraction << 13);   // NaN or infinite
    if (exponent == 0)                                      // zero or denormal: fraction 2^-24
        return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

// x / 2^bits, rounded to nearest even.
uint32_t shift_rounded(uint32_t x, int bits) {
    if (bits > 31) return 0;
    const uint32_t half = 1u << (bits - 1), kept = x >> bits, rest = x & ((1u << bits) - 1);
    return kept + (rest > half || (rest == half && kept % 2 == 1));
}

}  // namespace

float value_of_16_bits(uint16_t bits, bool bfloat16) {
    return bfloat16 ? float_of(static_cast<uint32_t>(bits) << 16) : value_of_float16(bits);
}

uint32_t float16_bits(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000u) return 0x7FFF;             // NaN
    if (magnitude >= 0x47800000u) return sign | 0x7C00;     // 2^16 and more
    if (magnitude >= 0x38800000u)                           // normal: rebias, round the fraction
        return sign | (shift_rounded(magnitude, 13) - (112 << 10));
    const uint32_t fraction = (magnitude & 0x7FFFFF) | (magnitude >> 23 ? 0x800000 : 0);
    return sign | shift_rounded(fraction, 126 - static_cast<int>(magnitude >> 23));
}

uint32_t bfloat16_bits(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & 0x7FFFFFFF) > 0x7F800000u ? 0x7FFF : shift_rounded(bits, 16);
}

}  // namespace emulator
