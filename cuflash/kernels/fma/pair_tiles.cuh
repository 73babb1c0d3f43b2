// A block's tile of pairs by fused multiply-adds, for the kernels of readouts/: S = A B^T of ROWS
// fixed rows, which warps share, and COLUMNS streamed ones. fma.cuh says which lane holds which
// numbers.
#pragma once
#include "fma/fma.cuh"
#include "readouts/padded_loads.cuh"
#include "score/lane_grid.cuh"

template <int ROWS, int COLUMNS> struct PairTiles : PaddedLoads {
    static constexpr int WARP_ROWS = ROWS / NUM_WARPS;
    static_assert(ROWS % (NUM_WARPS * LANE_ROWS) == 0, "every lane has as many rows");
    static_assert(COLUMNS % LANE_COLUMNS == 0, "every lane has as many columns");

    static constexpr int NUM_ROWS = ROWS, NUM_COLUMNS = COLUMNS, PIECES = 1;
    static constexpr int NUM_THREADS_OF_BLOCK = THREADS;
    static constexpr int OWN_ROWS = WARP_ROWS / LANE_ROWS, OWN_COLUMNS = COLUMNS / LANE_COLUMNS;
    static constexpr int ROW_SHARERS = LANE_COLUMNS;        // threads that share a row
    static constexpr int TOGETHER = 1;                      // neighbours among a thread's columns
    using Pairs = LaneGrid<LaneAxis<OWN_ROWS, 1, LANE_ROWS, ROW_LANES>,
                           LaneAxis<OWN_COLUMNS, 1, LANE_COLUMNS, COLUMN_LANES>>;
    using Real = float;
    using Scores = float[OWN_ROWS][OWN_COLUMNS];
    using RowTile = SmemTile<ROWS, HEAD_DIM>;
    using ColumnTile = SmemTile<COLUMNS, HEAD_DIM>;

    // The thread's rows and columns.
    static __device__ __forceinline__ int row(int i) {
        return threadIdx.x / 32 * WARP_ROWS + lane_row() + i * LANE_ROWS;
    }
    static __device__ __forceinline__ int column(int, int j) {
        return lane_column() + j * LANE_COLUMNS;
    }
    static __device__ __forceinline__ int sharer() { return lane_column(); }
    static __device__ __forceinline__ float& at(Scores& s, int i, int j) { return s[i][j]; }
    static __device__ __forceinline__ float exponential(float x) {
        return exp2_approx(x * LOG2_E);
    }

    __device__ __forceinline__ void take_rows(const RowTile&) {}
    __device__ __forceinline__ void products(
        Scores& s, const RowTile& rows, const ColumnTile& columns, int) const {
        gemm_abt<OWN_ROWS <= 4 ? 2 : 1>(s, rows, threadIdx.x / 32 * WARP_ROWS, columns, 0);
    }

    // ---- Sums of weights times columns ----

    using WeightTile = ::WeightTile<ROWS, COLUMNS>;
    static constexpr int OWN_SUMS = HEAD_DIM / LANE_COLUMNS;    // of each of the thread's rows
    using Sums = float[OWN_ROWS][OWN_SUMS];
    static __device__ __forceinline__ int sum_column(int n) {
        return lane_column() * CHUNK + n / CHUNK * (LANE_COLUMNS * CHUNK) + n % CHUNK;
    }
    static __device__ __forceinline__ float& sum_at(Sums& sums, int i, int n) {
        return sums[i][n];
    }
    static __device__ __forceinline__ void clear(Sums& sums) { set_zero(sums); }
    // sums += W columns. Lanes exchange W in shared memory.
    static __device__ __forceinline__ void accumulate(
        Sums& sums, const Scores& s, WeightTile& weights, const ColumnTile& columns) {
        const int warp_row = threadIdx.x / 32 * WARP_ROWS;
        __syncwarp();                                       // the weights before are done with
        write_weights(weights.at, warp_row, 0, s);
        __syncwarp();
        gemm_ab<false, COLUMNS>(
            sums, weights.at + warp_row, columns, 0, 0, [](int, int) { return true; }, false);
    }
};
