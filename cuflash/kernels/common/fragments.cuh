// C fragments of mma_16x8x16, M_TILES x N_TILES per warp: cleared, rounded, stored. ptx.cuh defines
// which lane holds which element of a fragment.
#pragma once
#include "common/smem.cuh"

template <int M_TILES, int N_TILES>
__device__ __forceinline__ void set_zero(float (&d)[M_TILES][N_TILES][4]) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) d[m][n][i] = 0.0f;
}

// C fragments rounded to Element, two neighbouring columns to a register: [m][n][0] belongs to the
// lane's upper row, [m][n][1] to its lower row.
template <int M_TILES, int N_TILES> using Packed = u32[M_TILES][N_TILES][2];

template <class Element, int M_TILES, int N_TILES>
__device__ __forceinline__ void pack_fragments(
    Packed<M_TILES, N_TILES>& packed, const float (&c)[M_TILES][N_TILES][4]) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            packed[m][n][0] = pack<Element>(c[m][n][0], c[m][n][1]);
            packed[m][n][1] = pack<Element>(c[m][n][2], c[m][n][3]);
        }
}

// Stores a warp's packed fragments to a tile of ROWS rows, from (first_row, first_column) on. A
// thread stores 4 bytes at a time. The swizzle puts the eight 16-byte rows of one store into
// different banks.
template <int ROWS, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_fragments(
    u32 tile, const Packed<M_TILES, N_TILES>& packed, int first_row, int first_column) {
    const int lane = opaque(threadIdx.x % 32);
    const int row = first_row + lane / 4, column = first_column + lane % 4 * 2;
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                store_shared(tile + tile_offset<ROWS>(row + m * 16 + half * 8, column + n * 8),
                             packed[m][n][half]);
}
