// An approximate maximum of many floats, computed on the upper 16 bits of each: two numbers per
// instruction.
#pragma once
#include "common/ptx.cuh"

// The largest upper half of N numbers, or of their magnitudes (OF_SIZES), as a word of
// max_of_upper_halves().
template <bool OF_SIZES, int N>
__device__ __forceinline__ u32 largest_upper_half(const float (&x)[N]) {
    constexpr int CHAINS = 4;                               // independent, to hide latency
    static_assert(N % (2 * CHAINS) == 0, "each number is compared");
    constexpr u32 LEAST = OF_SIZES ? 0u : 0xFC000000u;      // the latter is -2^121
    u32 largest[CHAINS] = {LEAST, LEAST, LEAST, LEAST};
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        u32& chain_max = largest[i % CHAINS];
        if constexpr (OF_SIZES)
            chain_max = max_of_upper_halves_of_sizes(chain_max, x[2 * i], x[2 * i + 1]);
        else
            chain_max = max_of_upper_halves(chain_max, x[2 * i], x[2 * i + 1]);
    }
    const auto number = [&](int chain) { return __uint_as_float(largest[chain]); };
    return max_of_upper_halves(
        max_of_upper_halves(largest[0], number(1), number(2)), number(3), number(3));
}

// An upper bound of N numbers, at most 2^-7 (relative) above the largest; NaN if one is NaN or its
// magnitude exceeds 2^121.
template <int N> __device__ __forceinline__ float largest_at_most(const float (&x)[N]) {
    const float rounded_down = __uint_as_float(largest_upper_half<false>(x) & 0xFFFF0000u);
    return fmaf(fabsf(rounded_down), 0x1p-7f, rounded_down);
}
