// Matmuls of tiles of doubles, or of floats split into tf32 parts, by mma_16x8x8: a warp computes
// M * 16 rows by N * 8 columns.
//
// A float x is the sum of x.high, its first 11 bits, and x.low, the rest, and
//     x y = x.low y.high + x.high y.low + x.high y.high
// except for x.low y.low: three MMAs instead of one. The tensor cores read 11 bits of x.low. With
// |x.low| <= 2^-11 |x|, and at most 2^-23 |x| of it unread, the error of a product is at most
// 2^-21 |x y|. Tensor cores truncate sums instead of rounding, so they sum only within a tile.
//
// Rows of a tile are padded by ROWS_PAD numbers: 8 rows of 4 floats, or 4 rows of 4 doubles, of the
// same columns, which lanes read at a time, are in different banks.
//
// Result columns that are columns of a tile (O = P V) are assigned to C fragments by CHUNK, so
// that lanes can read 16 bytes at once: of CHUNK tiles from n on, tile n + i has every CHUNK-th
// column from i on. Of those lane l has, in row l / 4 and in that 8 further down, the columns from
// CHUNK * 2t on and from CHUNK * (2t + 1) on, CHUNK each (t = l % 4):
//     d[n][0] d[n + 1][0] ..  and  d[n][1] d[n + 1][1] ..,   and [2] and [3] in the lower row.
#pragma once
#include "common/softmax.cuh"
#include "common/elements.cuh"
#include "common/padded_tiles.cuh"

constexpr bool IN_PARTS = sizeof(Element) == 4;

// Where a lane reads rows 2t and 2t + 1 and not t and t + 4: two rows are to differ by 32 bytes.
constexpr int VALUES_PAD = CHUNK;

// ---- Numbers of either type ----

struct alignas(2 * sizeof(Element)) Pair { Element x, y; };
__device__ __forceinline__ Pair pair_at(const Element* x) {
    return *reinterpret_cast<const Pair*>(x);
}

__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * LOG2_E); }

// softmax.cuh's, in double.
__device__ __forceinline__ double quad_sum(double x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// ---- Operands ----

struct Parts { u32 high, low; };
template <class T> struct OperandOf { using type = double; };
template <> struct OperandOf<float> { using type = Parts; };
using Operand = OperandOf<Element>::type;

__device__ __forceinline__ double operand(double x) { return x; }

// Rounded by adding half of what is cut off. An infinity, or what is rounded to one, has NaN for
// its low part, and so has a NaN.
__device__ __forceinline__ Parts operand(float x) {
    const u32 high = (__float_as_uint(x) + 0x1000) & 0xFFFFE000;
    return {high, __float_as_uint(x - __uint_as_float(high))};
}

__device__ __forceinline__ void multiply(
    double (&d)[4], const double (&a)[4], double b0, double b1) {
    mma_16x8x8(d, a, b0, b1);
}

__device__ __forceinline__ void multiply(
    float (&d)[4], const Parts (&a)[4], Parts b0, Parts b1) {
    const u32 high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
    const u32 low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
    mma_16x8x8(d, low, b0.high, b1.high);
    mma_16x8x8(d, high, b0.low, b1.low);
    mma_16x8x8(d, high, b0.high, b1.high);
}

// ---- Products ----

template <int M, int N> using Fragments = Element[M][N][4];

template <int M, int N> __device__ __forceinline__ void set_zero(Fragments<M, N>& d) {
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) d[m][n][i] = 0;
}

// The lane's numbers of the columns that its CHUNK tiles from n on share: chunk x, 0 or 1, of the
// upper row, or 2 or 3, of the lower.
template <int N>
__device__ __forceinline__ void chunk_of_tiles(
    Element (&numbers)[CHUNK], const Element (&d)[N][4], int n, int x) {
    #pragma unroll
    for (int c = 0; c < CHUNK; ++c) numbers[c] = d[n + c][x];
}

// The fragment of 16 rows of A: element (i, k) at rows[i * pitch + k], the lane's k being 0 and
// `second`.
__device__ __forceinline__ void load_rows(
    Operand (&a)[4], const Element* rows, int pitch, int second) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = operand(rows[i % 2 * 8 * pitch + i / 2 * second]);
}

// d[m][n] = A B^T: rows first_row + 16 m.. of a with rows first_column + 8 n.. of b, of COLUMNS
// columns, or, of PARTS of these, of part `part`. Forward and backward add in the same order and
// get the same scores to the last bit.
template <int PARTS = 1, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt(
    Element (&d)[M][N][4], const SmemTile<A_ROWS, COLUMNS>& a, int first_row,
    const SmemTile<B_ROWS, COLUMNS>& b, int first_column, int part = 0) {
    static_assert(COLUMNS % (PARTS * 8) == 0, "an MMA sums 8 columns");
    set_zero<M, N>(d);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = PARTS == 1 ? 0 : part * (COLUMNS / PARTS);
    const Element* rows = &a.at[first_row + g][first + t];
    const Element* others = &b.at[first_column + g][first + t];
    constexpr int PITCH = COLUMNS + ROWS_PAD;
    #pragma unroll 2
    for (int k = 0; k < COLUMNS / PARTS; k += 8) {
        Operand x[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) load_rows(x[m], rows + m * 16 * PITCH + k, PITCH, 4);
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            const Element* y = others + n * 8 * PITCH + k;
            const Operand first = operand(y[0]), second = operand(y[4]);
            #pragma unroll
            for (int m = 0; m < M; ++m) multiply(d[m][n], x[m], first, second);
        }
    }
}

// d[m][n + i] += A B for the CHUNK tiles from n on and one step of the sum, of which the lane's two
// rows of B begin their chunks at `first` and `second`.
template <int M, int N>
__device__ __forceinline__ void mma_chunks(
    Element (&d)[M][N][4], int n, const Operand (&a)[M][4], const Element* first,
    const Element* second) {
    const Chunk upper = chunk_at(first), lower = chunk_at(second);
    #pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const Operand b0 = operand(number(upper, i)), b1 = operand(number(lower, i));
        #pragma unroll
        for (int m = 0; m < M; ++m) multiply(d[m][n + i], a[m], b0, b1);
    }
}

// d[m][n + i] += sum[m][i]
template <int M, int N>
__device__ __forceinline__ void add_chunks(
    Element (&d)[M][N][4], int n, const Element (&sum)[M][CHUNK][4]) {
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            #pragma unroll
            for (int x = 0; x < 4; ++x) d[m][n + i][x] += sum[m][i][x];
}

// d += P V, P in C fragments as they stand: their columns 2t and 2t + 1 are the sum's indices that
// lane l takes, of operand A and so of V too, whose columns begin at first_column.
template <int M, int KEY_TILES, int N, int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ void gemm_ab(
    Element (&d)[M][N][4], const Element (&p)[M][KEY_TILES][4],
    const SmemTile<ROWS, COLUMNS, PAD>& v, int first_column = 0) {
    static_assert(N % CHUNK == 0, "tiles of columns come by CHUNK");
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto fragments = [&](Operand (&x)[M][4], int j) {
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            x[m][0] = operand(p[m][j][0]);
            x[m][1] = operand(p[m][j][2]);
            x[m][2] = operand(p[m][j][1]);
            x[m][3] = operand(p[m][j][3]);
        }
    };
    constexpr int PITCH = COLUMNS + PAD;
    const Element* rows = &v.at[2 * t][first_column + CHUNK * g];
    if constexpr (IN_PARTS) {                               // the tensor cores' sums begin anew
        #pragma unroll
        for (int n = 0; n < N; n += CHUNK) {
            Element sum[M][CHUNK][4];
            set_zero<M, CHUNK>(sum);
            #pragma unroll
            for (int j = 0; j < KEY_TILES; ++j) {
                Operand x[M][4];
                fragments(x, j);
                const Element* row = rows + j * 8 * PITCH + n * 8;
                mma_chunks(sum, 0, x, row, row + PITCH);
            }
            add_chunks(d, n, sum);
        }
    } else {
        #pragma unroll
        for (int j = 0; j < KEY_TILES; ++j) {
            Operand x[M][4];
            fragments(x, j);
            #pragma unroll
            for (int n = 0; n < N; n += CHUNK) {
                const Element* row = rows + j * 8 * PITCH + n * 8;
                mma_chunks(d, n, x, row, row + PITCH);
            }
        }
    }
}
