// A block's tile of pairs on CUDA cores, for the kernels of readouts/: S = A B^T of ROWS fixed rows
// and COLUMNS streamed ones, of any element type. NUM_THREADS / ROWS threads share a row.
#pragma once
#include "simt/row_pairs.cuh"
#include "simt/simt.cuh"

template <int ROWS, int COLUMNS> struct PairTiles {
    static constexpr int ROW_SHARERS = NUM_THREADS / ROWS;  // threads that share a row
    static_assert(ROW_SHARERS <= 32, "a warp has whole rows");
    static_assert(NUM_THREADS % ROWS == 0 && COLUMNS % ROW_SHARERS == 0, "all have as many pairs");

    static constexpr int NUM_ROWS = ROWS, NUM_COLUMNS = COLUMNS, PIECES = 1;
    static constexpr int NUM_THREADS_OF_BLOCK = NUM_THREADS;
    static constexpr int OWN_ROWS = 1, OWN_COLUMNS = COLUMNS / ROW_SHARERS;
    static constexpr int TOGETHER = 1;                      // neighbours among a thread's columns
    using Pairs = RowPairs<ROW_SHARERS, OWN_COLUMNS>;
    using Real = Accumulator<Element>;
    using Scores = Real[OWN_COLUMNS];
    using RowTile = Real[ROWS][HEAD_DIM + 1];
    using ColumnTile = Real[COLUMNS][HEAD_DIM + 1];

    // The thread's row and columns.
    static int row(int) { return threadIdx.x / ROW_SHARERS; }
    static int column(int, int j) { return sharer() + j * ROW_SHARERS; }
    static int sharer() { return threadIdx.x % ROW_SHARERS; }
    static Real& at(Scores& s, int, int j) { return s[j]; }
    static Real exponential(Real x) { return exp(x); }

    // The rows of one head from `start` on; those that token_of(row) names, 0 if it is negative.
    template <int COUNT>
    static void load(
        Real (&tile)[COUNT][HEAD_DIM + 1], const void* array, const Strides& stride, int batch,
        int head, int start, int seqlen, int num_columns) {
        load_tile<COUNT, HEAD_DIM>(
            tile, head_start(array, stride, batch, head), stride.token, start, seqlen,
            num_columns);
    }
    template <int COUNT, class TokenOf>
    static void gather(
        Real (&tile)[COUNT][HEAD_DIM + 1], const void* array, const Strides& stride, int batch,
        int head, int num_columns, TokenOf token_of) {
        const Element* first = head_start(array, stride, batch, head);
        for (int i = threadIdx.x; i < COUNT * HEAD_DIM; i += NUM_THREADS) {
            const int row = i / HEAD_DIM, column = i % HEAD_DIM, token = token_of(row);
            tile[row][column] = token >= 0 && column < num_columns
                ? to_accumulator(first[token * stride.token + column]) : Real(0);
        }
    }
    static void commit() {}
    static void wait() {}

    void take_rows(const RowTile&) {}
    void products(Scores& s, const RowTile& rows, const ColumnTile& columns, int) const {
        dot_products<OWN_COLUMNS, HEAD_DIM>(s, rows[row(0)], columns, sharer(), ROW_SHARERS);
    }

    // ---- Sums of weights times columns ----

    struct WeightTile { Real at[ROWS][COLUMNS + 1]; };
    static constexpr int OWN_SUMS = HEAD_DIM / ROW_SHARERS;
    using Sums = Real[OWN_SUMS];
    static int sum_column(int n) { return sharer() + n * ROW_SHARERS; }
    static Real& sum_at(Sums& sums, int, int n) { return sums[n]; }
    static void clear(Sums& sums) {
        for (int n = 0; n < OWN_SUMS; ++n) sums[n] = 0;
    }
    static Real element(const ColumnTile& tile, int row, int column) { return tile[row][column]; }
    // Of what this thread has loaded.
    static bool nonfinite(const ColumnTile& tile) {
        bool found = false;
        for (int i = threadIdx.x; i < COLUMNS * HEAD_DIM; i += NUM_THREADS)
            found |= !(fabs(tile[i / HEAD_DIM][i % HEAD_DIM]) < infinity());
        return found;
    }
    // sums += W columns. The threads of a row exchange W in shared memory.
    static void accumulate(
        Sums& sums, const Scores& s, WeightTile& weights, const ColumnTile& columns) {
        __syncwarp();                                       // the weights before are done with
        for (int j = 0; j < OWN_COLUMNS; ++j) weights.at[row(0)][column(0, j)] = s[j];
        __syncwarp();
        for (int c = 0; c < COLUMNS; ++c)
            for (int n = 0; n < OWN_SUMS; ++n)
                sums[n] = fma(weights.at[row(0)][c], columns[c][sum_column(n)], sums[n]);
    }
};
