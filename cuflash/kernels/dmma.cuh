// Products of tiles of doubles by mma_16x8x8: a warp multiplies M * 16 rows by N * 8 columns.
//
// Rows of a tile are 32 bytes longer than their columns. Then four rows of 32 bytes of the same
// columns lie in different banks, and that is what sixteen lanes read at a time where they read 8
// bytes each, or eight where they read 16.
//
// Columns of a product that are columns of a tile (O = P V) are dealt to C fragments in pairs of
// tiles, so that lanes can read two neighbours at once: tile 2n has the even ones of 16 columns and
// tile 2n + 1 the odd ones. Of such a pair lane l has, in row l / 4 and in that 8 further down, the
// four columns from 4t on (t = l % 4),
//     d[2n][0] d[2n + 1][0] d[2n][1] d[2n + 1][1],   and [2] and [3] in the lower row.
#pragma once
#include "softmax.cuh"

static_assert(sizeof(Element) == 8, "these kernels are double's");

constexpr int THREADS = NUM_WARPS * 32;
constexpr int CHUNK = 2;                                    // doubles of 16 bytes

constexpr int ROWS_PAD = 4;
// Where a lane reads rows 2t and 2t + 1 and not t and t + 4: two rows are to differ by 32 bytes.
constexpr int VALUES_PAD = 2;

template <int ROWS, int COLUMNS, int PAD = ROWS_PAD> struct alignas(16) Tile {
    static_assert(COLUMNS % 16 == 0, "rows of whole 128 bytes, and the pad");
    double at[ROWS][COLUMNS + PAD];
};

__device__ __forceinline__ double2 chunk_at(const double* x) {
    return *reinterpret_cast<const double2*>(x);
}

// Where one head of an array (batch, seqlen, heads, columns) begins.
__device__ __forceinline__ const double* head_start(
    const void* array, const Strides& stride, int batch, int head) {
    return static_cast<const double*>(array) + batch * stride.batch + head * stride.head;
}

// Starts the copy of ROWS rows, `stride` elements apart and 16-byte aligned. Rows from num_rows and
// columns from num_columns on are not read and become zero. By the whole block.
template <int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ void load_tile(
    Tile<ROWS, COLUMNS, PAD>& tile, const double* source, i64 stride, int num_rows,
    int num_columns) {
    constexpr int CHUNKS = COLUMNS / CHUNK;
    #pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        const int valid = row < num_rows ? min(max(num_columns - column, 0), CHUNK) * 8 : 0;
        cp_async_16_partly(
            shared_address(&tile.at[row][column]), source + row * stride + column, valid);
    }
}

// Whether one of the chunks that this thread itself loaded with load_tile holds a NaN or an
// infinity. Needs the thread's own cp_async_wait, no barrier.
template <int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ bool loaded_nonfinite(const Tile<ROWS, COLUMNS, PAD>& tile) {
    constexpr int CHUNKS = COLUMNS / CHUNK;
    bool found = false;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const double2 x = chunk_at(&tile.at[i / CHUNKS][i % CHUNKS * CHUNK]);
        found |= !(fabs(x.x) < infinity()) || !(fabs(x.y) < infinity());
    }
    return found;
}

template <int M, int N> __device__ __forceinline__ void set_zero(double (&d)[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) d[m][n][i] = 0.0;
}

// The fragment of 16 rows of A: element (i, k) at rows[i * pitch + k].
__device__ __forceinline__ void load_rows(double (&a)[4], const double* rows, int pitch) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = rows[i % 2 * 8 * pitch + i / 2 * 4];
}

// d[m][n] = A B^T: rows first_row + 16 m.. of a with rows first_column + 8 n.. of b, of COLUMNS
// columns. Forward and backward add in the same order and get the same scores to the last bit.
template <int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void row_products(
    double (&d)[M][N][4], const Tile<A_ROWS, COLUMNS>& a, int first_row,
    const Tile<B_ROWS, COLUMNS>& b, int first_column) {
    set_zero(d);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const double* rows = &a.at[first_row + g][t];
    const double* others = &b.at[first_column + g][t];
    constexpr int PITCH = COLUMNS + ROWS_PAD;
    #pragma unroll 2
    for (int k = 0; k < COLUMNS; k += 8) {
        double x[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) load_rows(x[m], rows + m * 16 * PITCH + k, PITCH);
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            const double* y = others + n * 8 * PITCH + k;
            #pragma unroll
            for (int m = 0; m < M; ++m) mma_16x8x8(d[m][n], x[m], y[0], y[4]);
        }
    }
}

// d += P V, P in C fragments as they stand: their columns 2t and 2t + 1 are the sum's indices that
// lane l takes, of operand A and so of V too.
template <int M, int KEY_TILES, int N, int ROWS, int COLUMNS>
__device__ __forceinline__ void add_weighted_rows(
    double (&d)[M][N][4], const double (&p)[M][KEY_TILES][4],
    const Tile<ROWS, COLUMNS, VALUES_PAD>& v) {
    static_assert(N % 2 == 0, "tiles of columns come in pairs");
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int j = 0; j < KEY_TILES; ++j) {
        double x[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            x[m][0] = p[m][j][0];
            x[m][1] = p[m][j][2];
            x[m][2] = p[m][j][1];
            x[m][3] = p[m][j][3];
        }
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            const double2 first = chunk_at(&v.at[j * 8 + 2 * t][n * 8 + 2 * g]);
            const double2 second = chunk_at(&v.at[j * 8 + 2 * t + 1][n * 8 + 2 * g]);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_16x8x8(d[m][n], x[m], first.x, second.x);
                mma_16x8x8(d[m][n + 1], x[m], first.y, second.y);
            }
        }
    }
}

// Writes two neighbouring numbers to a row that has num_columns columns.
__device__ __forceinline__ void store_chunk(
    double* row, int column, int num_columns, bool aligned, double x, double y) {
    if (aligned && column + CHUNK <= num_columns) {
        *reinterpret_cast<double2*>(row + column) = make_double2(x, y);
        return;
    }
    if (column < num_columns) row[column] = x;
    if (column + 1 < num_columns) row[column + 1] = y;
}

// Whether every row that `stride` leads to can be written 16 bytes at a time.
__device__ __forceinline__ bool rows_aligned(const void* pointer, const Strides& stride) {
    return ((reinterpret_cast<u64>(pointer)
             | stride.batch * 8 | stride.token * 8 | stride.head * 8) & 15) == 0;
}
