// decode/forward.cu's keys and values that are stored as float8_e4m3fn (common/float8.cuh). They
// become operands of mma.sync in registers, exactly; scales multiply scores and weights.
#pragma once
#include "common/smem.cuh"

// How a float8 number in the upper byte of a half becomes an element: exponent and mantissa are
// shifted to their places; the factor corrects the bias of 7.
template <class Element> struct Float8Fields;
template <> struct Float8Fields<float16> {
    static constexpr int SHIFT = 1;
    static constexpr u32 MASK = 0x3F803F80, FACTOR = 0x5C005C00;                        // 2^8
};
template <> struct Float8Fields<bfloat16> {
    static constexpr int SHIFT = 4;
    static constexpr u32 MASK = 0x07F007F0, FACTOR = 0x7B807B80;                        // 2^120
};

// Two numbers, in the upper bytes of the halves, as elements; NaN becomes 480.
template <class Element> __device__ __forceinline__ u32 finite_elements(u32 halves) {
    using Fields = Float8Fields<Element>;
    const u32 moved = (halves & 0x80008000u) | (halves >> Fields::SHIFT & Fields::MASK);
    return multiply_pairs<Element>(moved, Fields::FACTOR);
}

// Bytes 0 and 2 of a word, or bytes 1 and 3.
template <class Element> __device__ __forceinline__ u32 even_elements(u32 word) {
    return finite_elements<Element>(word << 8);
}
template <class Element> __device__ __forceinline__ u32 odd_elements(u32 word) {
    return finite_elements<Element>(word);
}

// The sign of each byte is set that is NaN; the other bits are meaningless. All bits of NaN but the
// sign are set, and of no other number: adding one carries into the sign's place.
constexpr u32 BYTE_SIGNS = 0x80808080u;
__device__ __forceinline__ u32 nan_carries(u32 word) { return (word & 0x7F7F7F7Fu) + 0x01010101u; }

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
