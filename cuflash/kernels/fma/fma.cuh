// Matmuls of float tiles by fused multiply-adds, without tensor cores, for fma/forward.cu and
// fma/backward.cu.
//
// A warp's lanes form a 4 x 8 grid over the output. A lane has rows that are 4 apart, and columns
// that are 8 apart where an output column is a row of the tile (S = Q K^T), or chunks of 4 columns
// that are 32 apart where it is a column (O = P V). With 8 x 8 numbers per lane, four steps of the
// sum are 16 loads of 16 bytes and 256 multiply-adds.
//
// Rows of a tile are 16 bytes longer than their columns: 8 rows of one chunk of columns lie in 8
// different groups of banks. Either lanes l and l ^ 1 or lanes l and l ^ 2 read the same 16 bytes,
// so the loads of two half-warps take two cycles instead of four.
#pragma once
#include "score/dropout.cuh"
#include "score/pair_mask.cuh"
#include "common/softmax.cuh"
#include "common/padded_tiles.cuh"

static_assert(sizeof(Element) == 4, "these kernels are float's");

constexpr int LANE_ROWS = 4, LANE_COLUMNS = 8;
constexpr unsigned ROW_LANES = 0x11, COLUMN_LANES = 0x0E;   // bits of a lane's number

__device__ __forceinline__ int lane_row() {
    return threadIdx.x % 2 + threadIdx.x % 32 / 16 * 2;
}
__device__ __forceinline__ int lane_column() { return threadIdx.x / 2 % 8; }

// Weights. Lanes write 4 rows of 8 neighbouring columns; with 8 more floats a row they hit each
// bank once.
template <int ROWS, int COLUMNS> struct alignas(16) WeightTile {
    static_assert(COLUMNS % 16 == 0, "rows of neighbouring lanes in other banks");
    float at[ROWS][COLUMNS + 8];
};

template <int M, int N> __device__ __forceinline__ void set_zero(float (&x)[M][N]) {
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < N; ++j) x[i][j] = 0.0f;
}

// Which of a lane's M x N (query, key) pairs dropout keeps. One call of Philox gives the words of
// four consecutive keys, which belong to four lanes: these lanes divide the calls among them and
// exchange the results. bits[n]: the results of the n-th of these lanes, 4 bits per call.
template <int M, int N> struct Kept {
    static constexpr int CALLS = (M * N + 3) / 4, WORDS = (CALLS + 7) / 8;
    u32 bits[4][WORDS];

    __device__ __forceinline__ bool at(int i, int j) const {
        const int pair = i * N + j;
        return (bits[pair % 4][pair / 32] >> (pair / 4 % 8 * 4)) & 1;
    }
};

// x becomes x Z: 0 where dropout drops the pair, larger elsewhere.
template <int M, int N>
__device__ __forceinline__ void apply_dropout(
    float (&x)[M][N], const Kept<M, N>& kept, const Dropout<float>& dropout) {
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < N; ++j) x[i][j] *= kept.at(i, j) ? dropout.factor : 0.0f;
}

// The warp's rows and columns begin at that query and that key. By a whole warp.
template <int M, int N>
__device__ __forceinline__ void find_kept(
    Kept<M, N>& kept, const Dropout<float>& dropout, int query, int key) {
    const int column = lane_column() % 4, lane = threadIdx.x % 32 - column * 2;
    query += lane_row();
    key += lane_column() - column;
    #pragma unroll
    for (int word = 0; word < Kept<M, N>::WORDS; ++word) {
        u32 own = 0;
        #pragma unroll 1
        for (int n = 0; n < min(Kept<M, N>::CALLS - word * 8, 8); ++n) {
            const int pair = (word * 8 + n) * 4 + column;
            own |= dropout.kept_of_four(query + pair / N * LANE_ROWS, key + pair % N * LANE_COLUMNS)
                << (n * 4);
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            kept.bits[i][word] = __shfl_sync(WHOLE_WARP, own, lane + i * 2) >> column;
    }
}

// The same of the warp's pairs, from `query` and `key` on. By a whole warp.
template <int M, int N>
__device__ __forceinline__ void apply_dropout(
    float (&x)[M][N], const Dropout<float>& dropout, int query, int key) {
    Kept<M, N> kept;
    find_kept(kept, dropout, query, key);
    apply_dropout(x, kept, dropout);
}

// s[i][j] = sum_d a[first_row + lane's row i][d] * b[first_column + lane's column j][d], added in
// the order of d: forward and backward get the same scores to the last bit. UNROLL: loads of one
// step of CHUNK columns overlap multiply-adds of another, in more registers.
template <int UNROLL = 1, int COLUMNS, int M, int N, int A_ROWS, int B_ROWS>
__device__ __forceinline__ void gemm_abt(
    float (&s)[M][N], const SmemTile<A_ROWS, COLUMNS>& a, int first_row,
    const SmemTile<B_ROWS, COLUMNS>& b, int first_column) {
    set_zero(s);
    const float* rows = a.at[first_row + lane_row()];
    const float* others = b.at[first_column + lane_column()];
    constexpr int PITCH = COLUMNS + ROWS_PAD, A_STEP = LANE_ROWS * PITCH;
    constexpr int B_STEP = LANE_COLUMNS * PITCH;
    #pragma unroll UNROLL
    for (int d = 0; d < COLUMNS; d += CHUNK) {
        float4 x[M];
        #pragma unroll
        for (int i = 0; i < M; ++i) x[i] = chunk_at(rows + i * A_STEP + d);
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            const float4 y = chunk_at(others + j * B_STEP + d);
            #pragma unroll
            for (int k = 0; k < CHUNK; ++k)
                #pragma unroll
                for (int i = 0; i < M; ++i) s[i][j] = fmaf(number(x[i], k), number(y, k), s[i][j]);
        }
    }
}

// A barrier. Returns, where gemm_ab() and gemm_atb() need it, whether any thread has loaded a NaN
// or an infinity.
template <bool MASKED, int ROWS, int COLUMNS>
__device__ __forceinline__ bool barrier_or_nonfinite(const SmemTile<ROWS, COLUMNS>& tile) {
    if constexpr (MASKED && PAIRWISE) {
        return __syncthreads_or(loaded_nonfinite(tile));
    } else {
        __syncthreads();
        return false;
    }
}

// sum[i][n] += sum_k weight[lane's row i][k] * b[first_k + k][lane's column n] over K steps. The
// lane's columns: chunks of 4, 32 apart, from first_column on. visible(i, k): whether a pair is
// added, as 0 * NaN is NaN. Tested only if MASKED and, where the test is slow, if b is `nonfinite`.
template <bool MASKED, int K, int M, int N, int PITCH, int B_ROWS, int COLUMNS, class F>
__device__ __forceinline__ void gemm_ab(
    float (&sum)[M][N], const float (*weights)[PITCH], const SmemTile<B_ROWS, COLUMNS>& b,
    int first_k, int first_column, F visible, bool nonfinite) {
    if (MASKED && PAIRWISE && !nonfinite)
        return gemm_ab<false, K>(sum, weights, b, first_k, first_column, visible, false);
    const float* rows = weights[lane_row()];
    const float* others = &b.at[first_k][first_column + lane_column() * CHUNK];
    #pragma unroll 1
    for (int k = 0; k < K; k += CHUNK) {
        float4 x[M];
        #pragma unroll
        for (int i = 0; i < M; ++i) x[i] = chunk_at(rows + i * LANE_ROWS * PITCH + k);
        #pragma unroll
        for (int kk = 0; kk < CHUNK; ++kk) {
            #pragma unroll
            for (int n = 0; n < N; n += CHUNK) {
                const float4 y = chunk_at(others + (k + kk) * (COLUMNS + ROWS_PAD) + n * 8);
                #pragma unroll
                for (int i = 0; i < M; ++i) {
                    if (MASKED && !visible(i, first_k + k + kk)) continue;
                    #pragma unroll
                    for (int c = 0; c < CHUNK; ++c)
                        sum[i][n + c] = fmaf(number(x[i], kk), number(y, c), sum[i][n + c]);
                }
            }
        }
    }
}

// sum[i][n] += sum_k weight[k][lane's row i] * b[k][lane's column n] over K steps: the weights
// transposed. The lane's rows: chunks of 4, 16 apart, from first_row on. Its columns, visible(i, k)
// and `nonfinite` as above.
template <bool MASKED, int K, int M, int N, int PITCH, int COLUMNS, class F>
__device__ __forceinline__ void gemm_atb(
    float (&sum)[M][N], const float (&weights)[K][PITCH], int first_row,
    const SmemTile<K, COLUMNS>& b, int first_column, F visible, bool nonfinite) {
    if (MASKED && PAIRWISE && !nonfinite)
        return gemm_atb<false>(
            sum, weights, first_row, b, first_column, visible, false);
    static_assert(M % CHUNK == 0 && N % CHUNK == 0, "rows and columns come in chunks");
    const float* rows = &weights[0][first_row + lane_row() * CHUNK];
    const float* others = &b.at[0][first_column + lane_column() * CHUNK];
    #pragma unroll (M * N >= 64 ? 4 : 8)
    for (int k = 0; k < K; ++k) {
        float4 x[M / CHUNK];
        #pragma unroll
        for (int i = 0; i < M; i += CHUNK) x[i / CHUNK] = chunk_at(rows + k * PITCH + i * 4);
        #pragma unroll
        for (int n = 0; n < N; n += CHUNK) {
            const float4 y = chunk_at(others + k * (COLUMNS + ROWS_PAD) + n * 8);
            #pragma unroll
            for (int i = 0; i < M; ++i) {
                if (MASKED && !visible(i, k)) continue;
                #pragma unroll
                for (int c = 0; c < CHUNK; ++c) {
                    const float weight = number(x[i / CHUNK], i % CHUNK);
                    sum[i][n + c] = fmaf(weight, number(y, c), sum[i][n + c]);
                }
            }
        }
    }
}

// Writes the lane's numbers of a product, rows 4 apart and columns 8 apart, to shared memory.
template <int M, int N, int PITCH>
__device__ __forceinline__ void write_weights(
    float (*weights)[PITCH], int first_row, int first_column, const float (&x)[M][N]) {
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < N; ++j)
            weights[first_row + lane_row() + i * LANE_ROWS]
                   [first_column + lane_column() + j * LANE_COLUMNS] = x[i][j];
}
