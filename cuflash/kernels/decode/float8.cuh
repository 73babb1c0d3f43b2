// decode/forward.cu's keys and values that are stored as float8_e4m3fn (common/float8.cuh). They
// are converted to elements exactly; scales multiply scores and weights.
#pragma once
#include "common/smem.cuh"

// How a float8 number in the upper byte of a half becomes an element: exponent and mantissa are
// shifted to their places; the factor corrects the bias of 7.
template <class> struct Float8Fields;
template <> struct Float8Fields<float16> {
    static constexpr int SHIFT = 1;
    static constexpr u32 MASK = 0x3F803F80, FACTOR = 0x5C005C00, NAN_BITS = 0x7E00;     // 2^8
};
template <> struct Float8Fields<bfloat16> {
    static constexpr int SHIFT = 4;
    static constexpr u32 MASK = 0x07F007F0, FACTOR = 0x7B807B80, NAN_BITS = 0x7FC0;     // 2^120
};

// Two numbers, in the upper bytes of the halves, as elements; NaN becomes 480.
template <class Element> __device__ __forceinline__ u32 finite_elements(u32 halves) {
    using Fields = Float8Fields<Element>;
    const u32 moved = (halves & 0x80008000u) | (halves >> Fields::SHIFT & Fields::MASK);
    return multiply_pairs<Element>(moved, Fields::FACTOR);
}

// The four numbers of a word, in order.
template <class Element>
__device__ __forceinline__ void convert_word(u32 word, u32 (&elements)[2]) {
    elements[0] = finite_elements<Element>((word & 0xFF) << 8 | (word & 0xFF00) << 16);
    elements[1] = finite_elements<Element>((word >> 8 & 0xFF00) | (word & 0xFF000000));
    // A carry into the sign: the other bits are 0x7F, NaN. Rare.
    const u32 is_nan = ((word & 0x7F7F7F7F) + 0x01010101) & 0x80808080;
    if (is_nan != 0)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (is_nan >> (i * 8) & 0x80)
                elements[i / 2] |= Float8Fields<Element>::NAN_BITS << (i % 2 * 16);
}

// Calls f(row, column) for the lane's chunks of a warp's tile of ROWS rows of COLUMNS float8
// numbers, stored as half as many of 16 bits; column counts those.
template <int ROWS, int COLUMNS, class F>
__device__ __forceinline__ void for_each_float8_chunk(F f) {
    constexpr int OF_ROW = COLUMNS / 16;
    #pragma unroll
    for (int i = 0; i < ROWS * OF_ROW / 32; ++i) {
        const int chunk = i * 32 + threadIdx.x % 32;
        f(chunk / OF_ROW, chunk % OF_ROW * CHUNK_ELEMENTS);
    }
}

// A lane's chunks of such a tile.
template <class Element, int ROWS, int COLUMNS> struct Float8Chunks {
    static_assert(ROWS * COLUMNS % 512 == 0, "every lane has as many chunks");
    uint4 chunks[ROWS * COLUMNS / 512];

    __device__ __forceinline__ void load(u32 tile) {
        int i = 0;
        for_each_float8_chunk<ROWS, COLUMNS>([&](int row, int column) {
            chunks[i++] = load_shared_16(tile + tile_offset<ROWS>(row, column));
        });
    }
    // As elements, to another tile.
    __device__ __forceinline__ void store(u32 tile) const {
        int i = 0;
        for_each_float8_chunk<ROWS, COLUMNS>([&](int row, int column) {
            const uint4 chunk = chunks[i++];
            const u32 target[2] = {tile + tile_offset<ROWS>(row, column * 2),
                                   tile + tile_offset<ROWS>(row, column * 2 + CHUNK_ELEMENTS)};
            store_words(target[0], chunk.x, chunk.y);
            store_words(target[1], chunk.z, chunk.w);
        });
    }

private:
    static __device__ __forceinline__ void store_words(u32 target, u32 first, u32 second) {
        u32 a[2], b[2];
        convert_word<Element>(first, a);
        convert_word<Element>(second, b);
        store_shared_16(target, __uint_as_float(a[0]), __uint_as_float(a[1]),
                        __uint_as_float(b[0]), __uint_as_float(b[1]));
    }
};
