// Products of tiles by mma.sync: a warp multiplies M_TILES * 16 rows by N_TILES * 8 columns.
//
// Operands stand in shared memory in the layout of smem.cuh, as they are named (A as m x k, B as
// k x n) or transposed; ldmatrix hands out the right fragments in all four cases, from 16 x 16
// blocks of the tile. A may also be held in registers. Sums are float, in C fragments: ptx.cuh says
// which lane holds which element of a fragment.
#pragma once
#include "common/smem.cuh"

// How an operand stands in its tile: rows of the tile are its first or its second index.
enum class Stored { AS_NAMED, TRANSPOSED };

// The lane's address within a 16 x 16 block at the tile's origin. ldmatrix loads four 8 x 8
// matrices, matrix i by the addresses of lanes 8i to 8i + 7. ROWS_FIRST: matrices 0 and 1 are the
// block's two left quarters (A as m x k and, transposed on the way, B as k x n); otherwise its two
// upper ones.
template <bool ROWS_FIRST> __device__ __forceinline__ u32 lane_offset() {
    const int lane = threadIdx.x % 32;
    const int row = lane % 8 + (ROWS_FIRST ? lane / 8 % 2 : lane / 16) * 8;
    const int chunk = ROWS_FIRST ? lane / 16 : lane / 8 % 2;
    return row * PANEL_ROW_BYTES + (chunk ^ (row % 8)) * CHUNK_BYTES;
}

// The lane's address in the block at rows 16 * block_row, columns 16 * block_column. A block is two
// chunks wide, so its number among a panel's four enters the swizzled chunk by exclusive or.
template <int ROWS>
__device__ __forceinline__ u32 block_address(u32 lane_address, int block_row, int block_column) {
    return (lane_address ^ (block_column % 4 * 2 * CHUNK_BYTES))
         + block_row * 16 * PANEL_ROW_BYTES + block_column / 4 * (ROWS * PANEL_ROW_BYTES);
}

// A warp's share of an operand: COUNT blocks from block `first` on, along rows or columns of the
// tile. The first block goes into the lane's address where that leaves the others a constant away:
// along rows always, along columns if COUNT is a power of two, of which `first` is a multiple.
template <int ROWS, int COUNT, bool ALONG_ROWS> struct Share {
    static constexpr bool FOLDED = ALONG_ROWS || (COUNT & (COUNT - 1)) == 0;
    u32 lane_address;
    int first;
    __device__ __forceinline__ Share(u32 lane, int first_block)
        : lane_address(opaque(
              !FOLDED      ? lane
              : ALONG_ROWS ? block_address<ROWS>(lane, first_block, 0)
                           : block_address<ROWS>(lane, 0, first_block))),
          first(FOLDED ? 0 : first_block) {}
    // Block i of the share, block k in the other direction.
    __device__ __forceinline__ u32 address(int i, int k) const {
        return ALONG_ROWS ? block_address<ROWS>(lane_address, i, k)
                          : block_address<ROWS>(lane_address, k, first + i);
    }
};

// A warp's COUNT * 16 rows of A. ROWS: of the tile as stored.
template <int ROWS, Stored STORED, int COUNT> struct OperandA {
    static constexpr bool AS_NAMED = STORED == Stored::AS_NAMED;
    Share<ROWS, COUNT, AS_NAMED> share;
    __device__ __forceinline__ OperandA(u32 tile, int first_row)
        : share(tile + lane_offset<AS_NAMED>(), first_row / 16) {}
    // The fragment of the share's rows 16 m.., columns 16 k.. .
    __device__ __forceinline__ void load(u32 (&a)[4], int m, int k) const {
        if (AS_NAMED) ldmatrix_x4(a, share.address(m, k));
        else ldmatrix_x4_transposed(a, share.address(m, k));
    }
};

// A warp's COUNT * 16 columns of B.
template <int ROWS, Stored STORED, int COUNT> struct OperandB {
    static constexpr bool AS_NAMED = STORED == Stored::AS_NAMED;
    Share<ROWS, COUNT, !AS_NAMED> share;
    __device__ __forceinline__ OperandB(u32 tile, int first_column)
        : share(tile + lane_offset<AS_NAMED>(), first_column / 16) {}
    // Rows 16 k.., columns 16 n.. of the share: fragments b[0] b[1] of the first eight columns,
    // b[2] b[3] of the others.
    __device__ __forceinline__ void load(u32 (&b)[4], int k, int n) const {
        if (AS_NAMED) ldmatrix_x4_transposed(b, share.address(n, k));
        else ldmatrix_x4(b, share.address(n, k));
    }
};

// D += A B, their common dimension being K_STEPS * 16; D in C fragments. The loop is unrolled by
// one panel, 4 steps: unrolled whole, the assembler loads fragments so far ahead that it spills. An
// A in registers needs it whole (UNROLL = K_STEPS): register arrays have no run-time index.
template <class Element, int K_STEPS, int UNROLL = 4, int M_TILES, int N_TILES, class A, class B>
__device__ __forceinline__ void product(float (&d)[M_TILES][N_TILES][4], const A& a, const B& b) {
    static_assert(N_TILES % 2 == 0, "a block of B is 16 columns");
    #pragma unroll UNROLL
    for (int k = 0; k < K_STEPS; ++k) {
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

// An operand A that a thread holds as C fragments (of P, say), rounded to Element: the layout of
// two neighbouring C fragments is that of one A fragment.
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

// An operand B with every NaN and infinity replaced by zero.
template <class Element, class B> struct Sanitized {
    B b;
    __device__ __forceinline__ void load(u32 (&fragment)[4], int k, int n) const {
        b.load(fragment, k, n);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 bad = nonfinite_bits<Element>(fragment[i]);
            fragment[i] &= ~((bad >> 15) * 0xFFFFu);
        }
    }
};

template <int M_TILES, int N_TILES>
__device__ __forceinline__ void set_zero(float (&d)[M_TILES][N_TILES][4]) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) d[m][n][i] = 0.0f;
}

// C fragments rounded to Element, two neighbours to a register: [m][n][0] are of the upper of the
// lane's two rows, [m][n][1] of the lower.
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

// Writes a warp's packed fragments to a tile of ROWS rows, from (first_row, first_column) on. 4
// bytes a thread; by the swizzle the eight rows of 16 bytes of a store lie in different banks.
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
