// A block's tile of pairs by mma_16x8x8, for the kernels of readouts/: S = A B^T of ROWS fixed
// rows, which warps share, and COLUMNS streamed ones.
#pragma once
#include "mma8/mma8.cuh"
#include "readouts/padded_loads.cuh"
#include "score/lane_grid.cuh"

template <int ROWS, int COLUMNS> struct PairTiles : PaddedLoads {
    static constexpr int WARP_ROWS = ROWS / NUM_WARPS;
    static constexpr int M_TILES = WARP_ROWS / 16, N_TILES = COLUMNS / 8;
    static_assert(ROWS % (NUM_WARPS * 16) == 0, "a warp's rows are 16-row tiles");

    static constexpr int NUM_ROWS = ROWS, NUM_COLUMNS = COLUMNS, PIECES = 1;
    static constexpr int NUM_THREADS_OF_BLOCK = THREADS;
    static constexpr int OWN_ROWS = M_TILES * 2, OWN_COLUMNS = N_TILES * 2;
    static constexpr int ROW_SHARERS = 4;                   // threads that share a row
    static constexpr int TOGETHER = 2;                      // neighbours among a thread's columns
    using Pairs = FragmentGrid<OWN_ROWS, OWN_COLUMNS>;
    using Real = Element;
    using Scores = Fragments<M_TILES, N_TILES>;
    using RowTile = SmemTile<ROWS, HEAD_DIM>;
    using ColumnTile = SmemTile<COLUMNS, HEAD_DIM>;

    // The thread's rows and columns.
    static __device__ __forceinline__ int row(int i) {
        return threadIdx.x / 32 * WARP_ROWS + i / 2 * 16 + i % 2 * 8 + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int column(int, int j) {
        return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
    }
    static __device__ __forceinline__ int sharer() { return threadIdx.x % 4; }
    static __device__ __forceinline__ Element& at(Scores& s, int i, int j) {
        return s[i / 2][j / 2][i % 2 * 2 + j % 2];
    }
    static __device__ __forceinline__ Element exponential(Element x) { return ::exponential(x); }

    __device__ __forceinline__ void take_rows(const RowTile&) {}
    __device__ __forceinline__ void products(
        Scores& s, const RowTile& rows, const ColumnTile& columns, int) const {
        gemm_abt(s, rows, threadIdx.x / 32 * WARP_ROWS, columns, 0);
    }

    // ---- Sums of weights times columns ----

    struct WeightTile { Element at[ROWS][COLUMNS]; };
    static constexpr int OWN_SUMS = HEAD_DIM / 4;           // of each of the thread's rows
    using Sums = Fragments<M_TILES, HEAD_DIM / 8>;
    // Of CHUNK tiles a thread has two chunks of each row (mma8.cuh).
    static __device__ __forceinline__ int sum_column(int n) {
        const int tile = n / 2, first = CHUNK * (threadIdx.x % 4 * 2 + n % 2);
        return tile / CHUNK * (8 * CHUNK) + first + tile % CHUNK;
    }
    static __device__ __forceinline__ Element& sum_at(Sums& sums, int i, int n) {
        return sums[i / 2][n / 2][i % 2 * 2 + n % 2];
    }
    static __device__ __forceinline__ void clear(Sums& sums) {
        set_zero<M_TILES, HEAD_DIM / 8>(sums);
    }
    // sums += W columns.
    static __device__ __forceinline__ void accumulate(
        Sums& sums, const Scores& weights, WeightTile&, const ColumnTile& columns) {
        gemm_ab(sums, weights, columns);
    }
};
