// Conversions between elements and the numbers that kernels compute with.
#pragma once
#include "common/types.cuh"
#include "common/ptx.cuh"

// An element as an Accumulator, exactly.
inline float to_accumulator(float16 x) { return to_float(x); }
inline float to_accumulator(bfloat16 x) { return to_float(x); }
inline float to_accumulator(float x) { return x; }
inline double to_accumulator(double x) { return x; }

// The first (place 0) or the second of two 16-bit elements in a word, as a float.
template <typename Half> inline float of_pair(u32 pair, int place) {
    if constexpr (sizeof(Half) != 2) return 0.0f;           // never called
    else return to_float(place == 0 ? low_half<Half>(pair) : high_half<Half>(pair));
}

// An Accumulator as an element, rounded to nearest even.
template <typename Element> inline Element from_accumulator(Accumulator<Element> x) {
    return {static_cast<u16>(pack<Element>(x, 0.0f))};
}
template <> inline float from_accumulator<float>(float x) { return x; }
template <> inline double from_accumulator<double>(double x) { return x; }

// a * b that no compiler fuses with an addition. S * scale must be the same number when the
// maximum is taken and when it is subtracted: with |S| = 1e30, half an ulp is 1e22 in an exponent.
inline float rounded(float a, float b) { return __fmul_rn(a, b); }
inline double rounded(double a, double b) { return __dmul_rn(a, b); }
