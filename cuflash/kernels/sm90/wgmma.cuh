// Matmuls of a warpgroup (wgmma) on tiles of smem.cuh. A tile's panel of 64 columns has the layout
// that TMA copies and matrix descriptors call 128-byte swizzle.
#pragma once
#include "common/smem.cuh"

constexpr int WARPGROUP = 128;                              // threads
constexpr int WGMMA_M = 64;                                 // rows of A
constexpr int WGMMA_K = 16;                                 // columns of A, rows of B

// A matrix descriptor (PTX ISA: Matrix Descriptor Format): addresses and offsets in units of 16
// bytes. Rows are 128 bytes; the swizzle's pattern repeats every eight rows. `panel_bytes` leads to
// the next 64 columns where M or N runs along the columns.
__device__ __forceinline__ u64 descriptor(u32 address, int panel_bytes) {
    constexpr u64 PATTERN_BYTES = 8 * PANEL_ROW_BYTES, SWIZZLE_128 = u64{1} << 62;
    return static_cast<u64>(address >> 4) | static_cast<u64>(panel_bytes >> 4) << 16
         | (PATTERN_BYTES >> 4) << 32 | SWIZZLE_128;
}

// The same in a cluster: address bits that say whose shared memory it is are not a descriptor's.
__device__ __forceinline__ u64 own_descriptor(u32 address, int panel_bytes) {
    return descriptor(address & 0x3FFFF, panel_bytes);
}

// The same descriptor with the address `bytes` further: the sum stays in the lower half.
__device__ __forceinline__ u64 advance(u64 descriptor, int bytes) {
    const u32 low = static_cast<u32>(descriptor) + (bytes >> 4);
    return descriptor >> 32 << 32 | low;
}

// The byte offset, in a tile of ROWS rows, of the 16 columns that k-step `step` sums over.
template <int ROWS> constexpr int column_step(int step) {
    constexpr int STEPS = PANEL_COLUMNS / WGMMA_K;
    return step / STEPS * ROWS * PANEL_ROW_BYTES + step % STEPS * WGMMA_K * 2;
}

// D = SIGN A B^T, or D += SIGN A B^T if `accumulate`, over COLUMNS columns of both; A is 64 rows,
// from the one at which `a` points.
template <typename Element, int SIGN, int A_ROWS, int B_ROWS, int COLUMNS, int COUNT>
__device__ __forceinline__ void gemm_abt_ss(
    float (&d)[COUNT], u64 a, u64 b, bool accumulate = false) {
    #pragma unroll
    for (int step = 0; step < COLUMNS / WGMMA_K; ++step)
        wgmma_shared<SIGN, false, false>(
            d, advance(a, column_step<A_ROWS>(step)), advance(b, column_step<B_ROWS>(step)),
            step > 0 || accumulate, Element{});
}

// D = SIGN A B^T as above, with A's first columns in registers, 16 for each four of `first`.
template <typename Element, int SIGN, int A_ROWS, int B_ROWS, int COLUMNS, int COUNT, int FRAGMENTS>
__device__ __forceinline__ void gemm_abt_rs(
    float (&d)[COUNT], const u32 (&first)[FRAGMENTS], u64 a_tile, u64 b_tile) {
    #pragma unroll
    for (int step = 0; step < COLUMNS / WGMMA_K; ++step) {
        const u64 b = advance(b_tile, column_step<B_ROWS>(step));
        if (step < FRAGMENTS / 4)
            wgmma_registers<SIGN, false>(d, first + 4 * step, b, step > 0, Element{});
        else
            wgmma_shared<SIGN, false, false>(
                d, advance(a_tile, column_step<A_ROWS>(step)), b, step > 0, Element{});
    }
}

// D = A B, or D += A B if `accumulate`: A in registers, ROWS rows of B.
template <typename Element, int ROWS, int COUNT, int FRAGMENTS>
__device__ __forceinline__ void gemm_ab_rs(
    float (&d)[COUNT], const u32 (&a)[FRAGMENTS], u64 b, bool accumulate) {
    static_assert(FRAGMENTS == ROWS / 4, "16 rows take four registers");
    #pragma unroll
    for (int step = 0; step < ROWS / WGMMA_K; ++step)
        wgmma_registers<1, true>(d, a + 4 * step, advance(b, step * WGMMA_K * PANEL_ROW_BYTES),
                                 step > 0 || accumulate, Element{});
}

// The same with A in shared memory, a tile of 64 rows.
template <typename Element, int ROWS, int COUNT>
__device__ __forceinline__ void gemm_ab_ss(float (&d)[COUNT], u64 a, u64 b, bool accumulate) {
    #pragma unroll
    for (int step = 0; step < ROWS / WGMMA_K; ++step)
        wgmma_shared<1, false, true>(
            d, advance(a, column_step<64>(step)), advance(b, step * WGMMA_K * PANEL_ROW_BYTES),
            step > 0 || accumulate, Element{});
}

// D = A^T B, or D += A^T B if `accumulate`, over ROWS rows of both; A is 64 columns, from the one
// at which `a` points.
template <typename Element, int ROWS, int COUNT>
__device__ __forceinline__ void gemm_atb_ss(
    float (&d)[COUNT], u64 a, u64 b, bool accumulate = false) {
    #pragma unroll
    for (int step = 0; step < ROWS / WGMMA_K; ++step)
        wgmma_shared<1, true, true>(
            d, advance(a, step * WGMMA_K * PANEL_ROW_BYTES),
            advance(b, step * WGMMA_K * PANEL_ROW_BYTES), step > 0 || accumulate, Element{});
}

// Rounds an accumulator to Element: its registers are then in the order of an A operand.
template <typename Element, int COUNT>
__device__ __forceinline__ void pack_pairs(u32 (&packed)[COUNT], const float (&d)[2 * COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) packed[i] = pack<Element>(d[2 * i], d[2 * i + 1]);
}

// Stores a warp's 16 rows of a rounded accumulator to a tile of ROWS rows, from first_row on, and
// from first_column on, where its columns and those before are those of one panel.
template <int ROWS, int COUNT>
__device__ __forceinline__ void store_rows(
    u32 tile, int first_row, int lane, const u32 (&packed)[COUNT], int first_column = 0) {
    const u32 chunk_of_lane =
        tile + tile_offset<ROWS>(first_row + lane % 16, first_column + lane / 16 * 8);
    #pragma unroll
    for (int j = 0; j < COUNT / 4; ++j)                     // 16 rows, 16 columns
        stmatrix_x4((chunk_of_lane ^ (j % 4 * 2 * CHUNK_BYTES)) + j / 4 * (ROWS * PANEL_ROW_BYTES),
                    packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
}

// ---- Stores of accumulators without shared memory ----

// The four lanes of a quad hold row q of a 4 x 4 matrix of words each; after this, column q.
__device__ __forceinline__ void transpose_in_quad(u32 (&words)[4]) {
    #pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        const bool upper = (threadIdx.x & distance) != 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & distance) != 0) continue;
            const u32 low = words[i], high = words[i + distance];
            const u32 sent = upper ? low : high;
            const u32 received = __shfl_xor_sync(0xFFFFFFFFu, sent, distance);
            words[i] = upper ? received : low;
            words[i + distance] = upper ? high : received;
        }
    }
}

// Stores the lane's two rows of an accumulator, rounded, to an array. `row` is the first, at `out`;
// rows from num_rows on are left out. `aligned`: the array's rows are, to 16 bytes.
template <typename Element, int COUNT>
__device__ __forceinline__ void store_to_array(
    Element* out, i64 stride, const float (&d)[COUNT], int row, int num_rows, int num_columns,
    bool aligned = true) {
    static_assert(COUNT % 16 == 0, "a quad has four tiles of 8 columns at a time");
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int j = 0; j < COUNT / 16; ++j) {
            u32 words[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = d + (j * 4 + i) * 4 + half * 2;
                words[i] = pack<Element>(pair[0], pair[1]);
            }
            transpose_in_quad(words);
            const int column = (j * 4 + threadIdx.x % 4) * CHUNK_ELEMENTS;
            if (row + half * 8 < num_rows)
                store_chunk(reinterpret_cast<u16*>(out) + half * 8 * stride + column,
                            {words[0], words[1], words[2], words[3]}, num_columns - column,
                            aligned);
        }
}
