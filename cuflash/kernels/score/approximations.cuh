// Quotients and tanh of a user's function for 16-bit elements (FAST), to some 2^-22 of the result;
// others have those of the library. Here: what a pair's text calls in place of ex::divide and
// ex::tanh (expression_functions.cuh) where it knows more.
#pragma once
#include "common/elements.cuh"

namespace ex {

// Between which numbers a divisor |b| is: from 2^-100 to 2^100; from 2^-100 on; any.
enum Divisors { MODERATE, FAR, ANY };
// a / b of a pair, as divide. FAST: the compiler shares what quotients of one b have in common.
// rcp.approx takes |b| below 2^-126 for 0, and the inverse of |b| above 2^126:
//
//     FAR     1 / b = rcp(b / 4) / 4, subnormal for the largest b
//     ANY     a / b = (a c) rcp(b c) with c = 2^(63 - e / 2), e of b's biased exponent: |b c| is
//             from 2^-86 to 2^64 or infinite; where a c is infinite or subnormal, a / b is, too
template <bool FAST, Divisors KIND, class T> inline T divide(T a, T b) {
    if constexpr (!FAST) {
        return a / b;
    } else if constexpr (KIND == MODERATE) {
        return a * reciprocal_approx(b);
    } else if constexpr (KIND == FAR) {
        return a * (T(0.25) * reciprocal_approx(T(0.25) * b));
    } else {
        const T c = __uint_as_float((190u << 23) - (__float_as_uint(b) >> 1 & 0x3F800000u));
        return a * c * reciprocal_approx(b * c);
    }
}

// tanh x = 1 - 2 / (1 + e^(2x)), to 8 * 2^-24 as in softcap.cuh: an infinite power has inverse 0.
inline float tanh_approx(float twice_log2) {
    return fmaf(-2.0f, reciprocal_approx(exp2_approx(twice_log2) + 1.0f), 1.0f);
}
// tanh a of a = x factor. SMALL: a^2 <= 0.2; the polynomial is softcap.cuh's poly4.
template <bool FAST, bool SMALL, class T> inline T tanh_of(T a, T x, T factor) {
    if constexpr (FAST && SMALL) {
        const T square = factor * factor, y = x * x;        // of the factor: a constant
        const T c1 = T(-0.33329662083994377) * square * factor;
        const T c2 = T(0.13235404148826932) * square * square * factor;
        const T c3 = T(-0.04596437588815598) * square * square * square * factor;
        return x * fma(fma(fma(c3, y, c2), y, c1), y, factor);
    } else if constexpr (FAST) {
        return tanh_approx(2.8853900817779268f * factor * x);
    } else {
        return ::tanh(a);
    }
}

}  // namespace ex
