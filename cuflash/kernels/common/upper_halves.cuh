// The largest of many numbers, nearly: by their upper halves, two numbers an instruction.
#pragma once
#include "common/ptx.cuh"

// Of N numbers, or of their sizes: the upper half of a word, as max_of_upper_halves() has it.
template <bool OF_SIZES, int N>
__device__ __forceinline__ u32 largest_upper_half(const float (&x)[N]) {
    constexpr int CHAINS = 4;                               // for results are waited for
    static_assert(N % (2 * CHAINS) == 0, "each is looked at");
    constexpr u32 LEAST = OF_SIZES ? 0u : 0xFC000000u;      // the latter is -2^121
    u32 largest[CHAINS] = {LEAST, LEAST, LEAST, LEAST};
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        u32& of_chain = largest[i % CHAINS];
        if constexpr (OF_SIZES)
            of_chain = max_of_upper_halves_of_sizes(of_chain, x[2 * i], x[2 * i + 1]);
        else
            of_chain = max_of_upper_halves(of_chain, x[2 * i], x[2 * i + 1]);
    }
    const auto number = [&](int chain) { return __uint_as_float(largest[chain]); };
    return max_of_upper_halves(
        max_of_upper_halves(largest[0], number(1), number(2)), number(3), number(3));
}

// No less than any of N numbers, by 2^-7 at most; NaN if one is NaN, or beyond 2^121 either way.
template <int N> __device__ __forceinline__ float largest_at_most(const float (&x)[N]) {
    const float rounded_down = __uint_as_float(largest_upper_half<false>(x) & 0xFFFF0000u);
    return fmaf(fabsf(rounded_down), 0x1p-7f, rounded_down);
}
