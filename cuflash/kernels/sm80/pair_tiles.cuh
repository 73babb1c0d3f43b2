// A block's tile of pairs by mma.sync, for the kernels of readouts/: S = A B^T of ROWS fixed rows
// and COLUMNS streamed ones.
//
// Warps share the rows, M_TILES * 16 each. If KEEPS_ROWS their fragments of A stay in registers, so
// only B is read from shared memory, once for M_TILES MMAs. A tile of B is used in pieces of PIECE
// columns, whose S registers hold, without a barrier between them: one warp's exponentials overlap
// another's MMAs.
#pragma once
#include "common/constants.cuh"
#include "common/softmax.cuh"
#include "score/lane_grid.cuh"
#include "sm80/mma.cuh"

constexpr int THREADS = NUM_WARPS * 32;

template <int ROWS, int COLUMNS, bool KEEPS_ROWS = true> struct PairTiles {
    static constexpr int WARP_ROWS = ROWS / NUM_WARPS, M_TILES = WARP_ROWS / 16;
    static constexpr int N_TILES = PIECE / 8, K_BLOCKS = HEAD_DIM / 16;
    static_assert(ROWS % (NUM_WARPS * 16) == 0, "a warp's rows are 16-row tiles");
    static_assert(COLUMNS % PIECE == 0 && PIECE % 16 == 0, "pieces are whole blocks of B");

    static constexpr int NUM_ROWS = ROWS, NUM_COLUMNS = COLUMNS, NUM_THREADS_OF_BLOCK = THREADS;
    static constexpr int OWN_ROWS = M_TILES * 2, OWN_COLUMNS = N_TILES * 2;
    static constexpr int PIECES = COLUMNS / PIECE;
    static constexpr int ROW_SHARERS = 4;                   // threads that share a row
    static constexpr int TOGETHER = 2;                      // neighbours among a thread's columns
    using Pairs = FragmentGrid<OWN_ROWS, OWN_COLUMNS>;
    using Real = float;
    using Scores = float[M_TILES][N_TILES][4];
    using RowTile = SmemTile<ROWS, HEAD_DIM>;
    using ColumnTile = SmemTile<COLUMNS, HEAD_DIM>;

    struct WeightTile { float at[ROWS][COLUMNS]; };

    u32 rows[KEEPS_ROWS ? K_BLOCKS : 1][M_TILES][4];

    // The thread's rows, and its columns of a piece.
    static __device__ __forceinline__ int row(int i) {
        return threadIdx.x / 32 * WARP_ROWS + i / 2 * 16 + i % 2 * 8 + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int column(int piece, int j) {
        return piece * PIECE + j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
    }
    static __device__ __forceinline__ int sharer() { return threadIdx.x % 4; }
    static __device__ __forceinline__ float& at(Scores& s, int i, int j) {
        return s[i / 2][j / 2][i % 2 * 2 + j % 2];
    }
    static __device__ __forceinline__ float exponential(float x) {
        return exp2_approx(x * LOG2_E);
    }

    // Starts the copy of the rows of one head from `start` on; of those that token_of(row) names,
    // none if it is negative.
    template <int COUNT>
    static __device__ __forceinline__ void load(
        SmemTile<COUNT, HEAD_DIM>& tile, const void* array, const Strides& stride, int batch,
        int head, int start, int seqlen, int num_columns) {
        const u16* from = thread_source(
            array, batch * stride.batch + head * stride.head + start * stride.token, stride.token);
        load_tile<COUNT, HEAD_DIM, THREADS, missing<PADDED>(true)>(
            shared_address(&tile), from, stride.token, seqlen - start, num_columns);
    }
    template <int COUNT, class TokenOf>
    static __device__ __forceinline__ void gather(
        SmemTile<COUNT, HEAD_DIM>& tile, const void* array, const Strides& stride, int batch,
        int head, int num_columns, TokenOf token_of) {
        const u16* first = static_cast<const u16*>(array) + batch * stride.batch
                         + head * stride.head;
        for_each_chunk<COUNT, HEAD_DIM, THREADS>(threadIdx.x, [&](int row, int column) {
            const int token = token_of(row);
            const int valid = min(max(num_columns - column, 0), CHUNK_ELEMENTS) * 2;
            cp_async_16_partly(shared_address(&tile) + tile_offset<COUNT>(row, column),
                               first + max(token, 0) * stride.token + column,
                               token < 0 ? 0 : valid);
        });
    }
    static __device__ __forceinline__ void commit() { cp_async_commit(); }
    static __device__ __forceinline__ void wait() { cp_async_wait<0>(); }

    // Once the tile has arrived, for all threads.
    __device__ __forceinline__ void take_rows(const RowTile& tile) {
        if constexpr (!KEEPS_ROWS) return;
        const OperandA<ROWS, Stored::AS_NAMED, M_TILES> a(
            shared_address(&tile), threadIdx.x / 32 * WARP_ROWS);
        #pragma unroll
        for (int k = 0; k < K_BLOCKS; ++k)
            #pragma unroll
            for (int m = 0; m < M_TILES; ++m) a.load(rows[k][m], m, k);
    }
    // S of a piece.
    __device__ __forceinline__ void products(
        Scores& s, const RowTile& tile, const ColumnTile& columns, int piece) const {
        set_zero(s);
        const OperandB<COLUMNS, Stored::TRANSPOSED, N_TILES / 2> b(
            shared_address(&columns), piece * PIECE);
        if constexpr (KEEPS_ROWS)
            gemm<Element, K_BLOCKS, K_BLOCKS>(s, Fixed{rows}, b);
        else
            gemm<Element, K_BLOCKS>(
                s, OperandA<ROWS, Stored::AS_NAMED, M_TILES>(
                       shared_address(&tile), threadIdx.x / 32 * WARP_ROWS), b);
    }

    // ---- Sums of weights times columns ----

    static constexpr int OWN_SUMS = HEAD_DIM / 4;           // of each of the thread's rows
    using Sums = float[M_TILES][HEAD_DIM / 8][4];
    static __device__ __forceinline__ int sum_column(int n) {
        return n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2;
    }
    static __device__ __forceinline__ float& sum_at(Sums& sums, int i, int n) {
        return sums[i / 2][n / 2][i % 2 * 2 + n % 2];
    }
    static __device__ __forceinline__ void clear(Sums& sums) { set_zero(sums); }
    static __device__ __forceinline__ float element(const ColumnTile& tile, int row, int column) {
        return to_float(*reinterpret_cast<const Element*>(
            tile.bytes + tile_offset<COLUMNS>(row, column)));
    }
    // Of what this thread has loaded.
    static __device__ __forceinline__ bool nonfinite(const ColumnTile& tile) {
        return loaded_nonfinite<Element, COLUMNS, HEAD_DIM, THREADS>(shared_address(&tile));
    }
    // sums += W columns, of one piece.
    static __device__ __forceinline__ void accumulate(
        Sums& sums, const Scores& weights, WeightTile&, const ColumnTile& columns) {
        static_assert(PIECES == 1, "W has all columns");
        gemm<Element, COLUMNS / 16, COLUMNS / 16>(
            sums, RegisterA<Element, M_TILES, N_TILES>(weights),
            OperandB<COLUMNS, Stored::AS_NAMED, HEAD_DIM / 16>(shared_address(&columns), 0));
    }

private:
    struct Fixed {
        const u32 (&rows)[K_BLOCKS][M_TILES][4];
        __device__ __forceinline__ void load(u32 (&a)[4], int m, int k) const {
            #pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = rows[k][m][i];
        }
    };
};
