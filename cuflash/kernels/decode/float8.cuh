// decode/forward.cu's keys and values that are stored as float8_e4m3fn (common/float8.cuh). They are
// converted to Element exactly; scales multiply scores and weights.
//
// Constants: Element.
#pragma once
#include "common/float8.cuh"
#include "common/smem.cuh"

// Two neighbours, the bytes 2 PAIR and 2 PAIR + 1 of a word, as elements in a register.
template <int PAIR> __device__ __forceinline__ u32 elements_of_float8(u32 word) {
    float x[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = float8_to_float(word << (24 - PAIR * 16 - i * 8));
    return pack<Element>(x[0], x[1]);
}

// A warp's tile of float8 numbers, two to each 16 bits, as elements in another tile.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void convert_float8(u32 stored, u32 elements) {
    for_each_chunk<ROWS, COLUMNS / 2, 32>(threadIdx.x % 32, [&](int row, int column) {
        const uint4 chunk = load_shared_16(stored + tile_offset<ROWS>(row, column));
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 target = elements + tile_offset<ROWS>(row, column * 2 + half * CHUNK_ELEMENTS);
            const u32 a = words[half * 2], b = words[half * 2 + 1];
            store_shared_16(target, __uint_as_float(elements_of_float8<0>(a)),
                            __uint_as_float(elements_of_float8<1>(a)),
                            __uint_as_float(elements_of_float8<0>(b)),
                            __uint_as_float(elements_of_float8<1>(b)));
        }
    });
    __syncwarp();
}
