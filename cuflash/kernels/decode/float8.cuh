// decode/forward.cu's keys and values that are stored as float8_e4m3fn (common/float8.cuh). They
// become operands of mma.sync in registers, exactly; scales multiply scores and weights.
#pragma once
#include "common/smem.cuh"

// A word's four numbers as float16, exactly: bytes 0 and 1, bytes 2 and 3.
template <bool BY_INSTRUCTION = CONVERTS_FLOAT8>
__device__ __forceinline__ void float8_to_float16(u32 (&pairs)[2], u32 word) {
    if constexpr (BY_INSTRUCTION) {
        e4m3_to_float16(pairs, word);
    } else {
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            // In the upper bytes of two halves; exponent and mantissa go to their places, and a
            // factor of 2^8 corrects the bias of 7. NaN would become 480.
            const u32 halves = (word >> i * 16 & 0xFF) << 8 | (word >> i * 16 & 0xFF00) << 16;
            const u32 moved = (halves & 0x80008000u) | (halves >> 1 & 0x3F803F80u);
            const u32 is_nan = ((halves & 0x7F007F00u) + 0x01000100u) & 0x80008000u;
            pairs[i] = multiply_float16_pairs(moved, 0x5C005C00u) | (is_nan >> 15) * 0x7E00u;
        }
    }
}

// A pair of float16 as elements, exactly: all types hold all float8 numbers.
template <class Element> __device__ __forceinline__ u32 to_elements(u32 float16s);
template <> __device__ __forceinline__ u32 to_elements<float16>(u32 float16s) { return float16s; }
template <> __device__ __forceinline__ u32 to_elements<bfloat16>(u32 float16s) {
    return pack<bfloat16>(to_float(low_half<float16>(float16s)),
                          to_float(high_half<float16>(float16s)));
}

// The sign of each byte is set that is NaN, no other bit. All bits of NaN but the sign are set, and
// of no other number: adding one carries into the sign's place.
__device__ __forceinline__ u32 nan_signs(u32 word) {
    return ((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
}

// Calls f(row, column) for the lane's chunks of a warp's tile of ROWS rows of COLUMNS float8
// numbers, stored as half as many of 16 bits; column counts those.
template <int ROWS, int COLUMNS, class F>
__device__ __forceinline__ void for_each_float8_chunk(F f) {
    constexpr int OF_ROW = COLUMNS / 16;
    static_assert(ROWS * OF_ROW % 32 == 0, "every lane has as many chunks");
    #pragma unroll
    for (int i = 0; i < ROWS * OF_ROW / 32; ++i) {
        const int chunk = i * 32 + threadIdx.x % 32;
        f(chunk / OF_ROW, chunk % OF_ROW * CHUNK_ELEMENTS);
    }
}
