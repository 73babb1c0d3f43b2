// Matmuls by mma.sync: a warp computes M_TILES * 16 rows x N_TILES * 8 columns of D += A B.
//
// Operands are in shared memory in the swizzled layout of smem.cuh, either as named (A as m x k, B
// as k x n) or transposed. ldmatrix, with or without .trans, loads the fragments in all four cases,
// from 16 x 16 blocks of the tile. A may also be in registers. D is float, in C fragments.
#pragma once
#include "common/fragments.cuh"

// How an operand is stored: the rows of its tile are its first index or its second.
enum class Stored { AS_NAMED, TRANSPOSED };

// The lane's address within the 16 x 16 block at the tile's origin. ldmatrix_x4 loads four 8 x 8
// matrices, matrix i from the row addresses of lanes 8i to 8i + 7. ROWS_FIRST: matrices 0 and 1 are
// the block's left quarters (A as m x k; B as k x n, transposed by ldmatrix); otherwise they are
// its upper quarters.
template <bool ROWS_FIRST> __device__ __forceinline__ u32 lane_offset() {
    const int lane = threadIdx.x % 32;
    const int row = lane % 8 + (ROWS_FIRST ? lane / 8 % 2 : lane / 16) * 8;
    const int chunk = ROWS_FIRST ? lane / 16 : lane / 8 % 2;
    return row * PANEL_ROW_BYTES + (chunk ^ (row % 8)) * CHUNK_BYTES;
}

// The lane's address in the block at rows 16 * block_row, columns 16 * block_column. A block is two
// chunks wide, so its index among a panel's four blocks is xored into the swizzled chunk.
template <int ROWS>
__device__ __forceinline__ u32 block_address(u32 lane_address, int block_row, int block_column) {
    return (lane_address ^ (block_column % 4 * 2 * CHUNK_BYTES))
         + block_row * 16 * PANEL_ROW_BYTES + block_column / 4 * (ROWS * PANEL_ROW_BYTES);
}

// A warp's part of an operand: COUNT blocks from `first_block` on, along the tile's rows or
// columns. FOLDED: the first block is part of the lane's address, and the others are at constant
// offsets from it. That is possible along rows; along columns, where the swizzle xors, only if
// COUNT is a power of two and first_block a multiple of it.
template <int ROWS, int COUNT, bool ALONG_ROWS> struct BlockRange {
    static constexpr bool FOLDED = ALONG_ROWS || (COUNT & (COUNT - 1)) == 0;
    u32 lane_address;
    int first;
    __device__ __forceinline__ BlockRange(u32 lane, int first_block)
        : lane_address(opaque(
              !FOLDED      ? lane
              : ALONG_ROWS ? block_address<ROWS>(lane, first_block, 0)
                           : block_address<ROWS>(lane, 0, first_block))),
          first(FOLDED ? 0 : first_block) {}
    // Block i of the range, block k in the other direction.
    __device__ __forceinline__ u32 address(int i, int k) const {
        return ALONG_ROWS ? block_address<ROWS>(lane_address, i, k)
                          : block_address<ROWS>(lane_address, k, first + i);
    }
};

// A warp's COUNT * 16 rows of A. ROWS: rows of the tile as stored. Its columns begin at the tile's
// column FIRST_COLUMN.
template <int ROWS, Stored STORED, int COUNT, int FIRST_COLUMN = 0> struct OperandA {
    static constexpr bool AS_NAMED = STORED == Stored::AS_NAMED;
    BlockRange<ROWS, COUNT, AS_NAMED> blocks;
    __device__ __forceinline__ OperandA(u32 tile, int first_row)
        : blocks(tile + lane_offset<AS_NAMED>(), first_row / 16) {}
    // The fragment of rows 16 m.., columns 16 k.. of the warp's part.
    __device__ __forceinline__ void load(u32 (&a)[4], int m, int k) const {
        if (AS_NAMED) ldmatrix_x4(a, blocks.address(m, k + FIRST_COLUMN / 16));
        else ldmatrix_x4_transposed(a, blocks.address(m, k + FIRST_COLUMN / 16));
    }
};

// A warp's COUNT * 16 columns of B.
template <int ROWS, Stored STORED, int COUNT> struct OperandB {
    static constexpr bool AS_NAMED = STORED == Stored::AS_NAMED;
    BlockRange<ROWS, COUNT, !AS_NAMED> blocks;
    __device__ __forceinline__ OperandB(u32 tile, int first_column)
        : blocks(tile + lane_offset<AS_NAMED>(), first_column / 16) {}
    // Rows 16 k.., columns 16 n.. of the warp's part: b[0] b[1] are the fragment of the first eight
    // columns, b[2] b[3] that of the last eight.
    __device__ __forceinline__ void load(u32 (&b)[4], int k, int n) const {
        if (AS_NAMED) ldmatrix_x4_transposed(b, blocks.address(n, k));
        else ldmatrix_x4(b, blocks.address(n, k));
    }
};

// D += A B over K_BLOCKS * 16 indices; D in C fragments. The loop is unrolled by one panel, 4
// blocks: fully unrolled, ptxas loads fragments so far ahead that it spills. An A in registers
// needs the loop fully unrolled (UNROLL = K_BLOCKS), because register arrays have no run-time
// index.
template <class Element, int K_BLOCKS, int UNROLL = 4, int M_TILES, int N_TILES, class A, class B>
__device__ __forceinline__ void gemm(float (&d)[M_TILES][N_TILES][4], const A& a, const B& b) {
    static_assert(N_TILES % 2 == 0, "a block of B is 16 columns");
    #pragma unroll UNROLL
    for (int k = 0; k < K_BLOCKS; ++k) {
        u32 a_fragment[M_TILES][4];
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m) a.load(a_fragment[m], m, k);
        #pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            u32 b_fragment[4];
            b.load(b_fragment, k, n / 2);
            #pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_16x8x16(d[m][n], a_fragment[m], b_fragment[0], b_fragment[1], Element{});
                mma_16x8x16(d[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3], Element{});
            }
        }
    }
}

// A warp's 8 columns of B stored TRANSPOSED: rows 32 k.. of it, of which b[0] b[1] are the fragment
// of the first 16, b[2] b[3] that of the others. ROWS: rows of the tile as stored.
template <int ROWS> struct NarrowB {
    u32 lane_address;
    __device__ __forceinline__ NarrowB(u32 tile, int first_column) {
        const int lane = threadIdx.x % 32, row = first_column + lane % 8;
        lane_address =
            opaque(tile + row * PANEL_ROW_BYTES + (lane / 8 ^ lane % 8) * CHUNK_BYTES);
    }
    __device__ __forceinline__ void load(u32 (&b)[4], int k) const {
        ldmatrix_x4(b, (lane_address ^ (k % 2 * 4 * CHUNK_BYTES))
                           + k / 2 * (ROWS * PANEL_ROW_BYTES));
    }
};

// D += A B over COLUMNS indices, B stored TRANSPOSED in a tile of ROWS rows, from its column
// first_column on. Sums in the same order whatever the warps' shares.
template <class Element, int COLUMNS, int ROWS, int M_TILES, int N_TILES, class A>
__device__ __forceinline__ void gemm_transposed(
    float (&d)[M_TILES][N_TILES][4], const A& a, u32 b_tile, int first_column) {
    if constexpr (N_TILES > 1) {
        gemm<Element, COLUMNS / 16>(
            d, a, OperandB<ROWS, Stored::TRANSPOSED, N_TILES / 2>(b_tile, first_column));
    } else {
        const NarrowB<ROWS> b(b_tile, first_column);
        #pragma unroll 2
        for (int k = 0; k < COLUMNS / 32; ++k) {
            u32 b_fragment[4];
            b.load(b_fragment, k);
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                #pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    u32 a_fragment[4];
                    a.load(a_fragment, m, 2 * k + half);
                    mma_16x8x16(d[m][0], a_fragment, b_fragment[2 * half],
                                b_fragment[2 * half + 1], Element{});
                }
            }
        }
    }
}

// Operand A from a thread's C fragments (of P, say), rounded to Element: two neighbouring C
// fragments have the layout of one A fragment.
template <class Element, int M_TILES, int N_TILES> struct RegisterA {
    u32 fragment[M_TILES][N_TILES / 2][4];
    __device__ __forceinline__ explicit RegisterA(const float (&c)[M_TILES][N_TILES][4]) {
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            #pragma unroll
            for (int n = 0; n < N_TILES; n += 2)
                #pragma unroll
                for (int i = 0; i < 4; ++i)
                    fragment[m][n / 2][i] = pack<Element>(c[m][n + i / 2][i % 2 * 2],
                                                          c[m][n + i / 2][i % 2 * 2 + 1]);
    }
    __device__ __forceinline__ void load(u32 (&a)[4], int m, int k) const {
        #pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = fragment[m][k][i];
    }
};

// Operand B with every NaN and infinity replaced by zero.
template <class Element, class B> struct Sanitized {
    B b;
    __device__ __forceinline__ void load(u32 (&fragment)[4], int k, int n) const {
        b.load(fragment, k, n);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 signs = nonfinite_bits<Element>(fragment[i]);
            fragment[i] &= ~((signs >> 15) * 0xFFFFu);
        }
    }
};
