// Shared by the kernels on CUDA cores: tiles in shared memory and dot products. The kernels take
// all element types; they compute, and keep tiles in shared memory, in Real: float, or double for
// double elements.
//
// A block's threads form rows. A kernel that owns ROWS queries (or keys) has NUM_THREADS / ROWS
// threads for each, thread / threads_per_row being the row. They share the columns: thread t of a
// row has the columns t, t + threads_per_row, t + 2 threads_per_row, ... of every tile.
// A row of a tile is one element longer than its columns, so that threads that read one column of
// neighbouring rows meet no bank conflict.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "common/online_softmax.cuh"

using Real = Accumulator<Element>;

// The keys of a tile that a query sees: [first, end), of [first_key, num_keys) of all, but for
// those that pair_mask.cuh hides.
struct Visible { int first, end; };

// BLOCK_K keys, from k_start on.
inline Visible visible_keys(int first_key, int num_keys, int k_start) {
    const int first = WINDOW ? first_key - k_start : 0, end = num_keys - k_start;
    return {first < 0 ? 0 : first > BLOCK_K ? BLOCK_K : first,
            end < 0 ? 0 : end > BLOCK_K ? BLOCK_K : end};
}

// The larger of m and the row's visible scores; skips NaN. masked(j): whether key j is masked
// within the visible range.
template <class Masked>
inline Real max_of_visible(
    Real m, const Real (&row)[BLOCK_K + 1], Visible visible, Masked masked) {
    for (int j = visible.first; j < visible.end; ++j)
        if (!masked(j)) m = row[j] > m ? row[j] : m;
    return m;
}

// Where one head of an array (batch, seqlen, heads, columns) begins.
inline const Element* head_start(const void* array, const Strides& stride, int batch, int head) {
    return static_cast<const Element*>(array) + batch * stride.batch + head * stride.head;
}

// Rows start .. start + ROWS - 1 of an array (seqlen, columns) with one head's stride_token, to
// shared memory; what lies outside the array becomes 0. Called by all threads. No barrier inside.
template <int ROWS, int COLUMNS, int PITCH>
inline void load_tile(
    Real (&tile)[ROWS][PITCH], const Element* head, i64 stride_token,
    int start, int seqlen, int columns) {
    static_assert(COLUMNS <= PITCH, "a row of the tile holds a row of the array");
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += NUM_THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool inside = start + row < seqlen && column < columns;
        tile[row][column] =
            inside ? to_accumulator(head[(start + row) * stride_token + column]) : Real(0);
    }
}

// N products of one row with N others, a_n = sum_d row[d] * others[first + n * step][d], in the
// order of d: forward and backward get the same score to the last bit. An other past the tile is
// read as the tile's last; its product is not to be used.
template <int N, int COLUMNS, int ROWS, int PITCH>
inline void dot_products(
    Real (&a)[N], const Real* row, const Real (&others)[ROWS][PITCH], int first, int step) {
    const Real* other[N];
    for (int n = 0; n < N; ++n) {
        const int index = first + n * step;
        other[n] = others[index < ROWS ? index : ROWS - 1];
        a[n] = 0;
    }
    for (int d = 0; d < COLUMNS; ++d) {
        const Real x = row[d];
        for (int n = 0; n < N; ++n) a[n] = fma(x, other[n][d], a[n]);
    }
}
