// Gradients of mma8's backward kernels: matmuls of weights of pairs, which shared memory holds, and
// stores to global memory. The weights are a member of `shared`: a WeightTile.
#pragma once
#include "common/dq_semaphore.cuh"
#include "score/query_order.cuh"
#include "common/scheduler.cuh"
#include "mma8/warp_grids.cuh"
#include "score/score_tile.cuh"

// The fragment of A for 16 rows of D, from `row` on: queries, or, if TRANSPOSED, keys, two
// neighbours a lane. `first` and `second` are the lane's indices of the sum.
template <bool TRANSPOSED, class Shared>
__device__ __forceinline__ void load_weights(
    Operand (&a)[4], const Shared& shared, int row, int first, int second) {
    const int g = threadIdx.x % 32 / 4;
    if constexpr (TRANSPOSED) {
        const Pair upper = pair_at(&shared.weights.at[first][row + 2 * g]);
        const Pair lower = pair_at(&shared.weights.at[second][row + 2 * g]);
        a[0] = operand(upper.x);
        a[1] = operand(upper.y);
        a[2] = operand(lower.x);
        a[3] = operand(lower.y);
    } else if constexpr (IN_PARTS) {                        // second = first + 1
        const Pair upper = pair_at(&shared.weights.at[row + g][first]);
        const Pair lower = pair_at(&shared.weights.at[row + g + 8][first]);
        a[0] = operand(upper.x);
        a[1] = operand(lower.x);
        a[2] = operand(upper.y);
        a[3] = operand(lower.y);
    } else {
        load_rows(a, &shared.weights.at[row + g][first], BLOCK_K + ROWS_PAD, second - first);
    }
}

// D += A B over K indices, for the warp's rows and columns of D. A is the weights, B a tile of
// K rows. Of eight indices a lane takes the two whose rows of B lie in different banks.
template <class Grid, bool TRANSPOSED, class Shared, int K, int COLUMNS>
__device__ __forceinline__ void weights_gemm(
    typename Grid::Sums& d, const Shared& shared, const SmemTile<K, COLUMNS>& b) {
    constexpr int M = Grid::M_TILES, N = Grid::N_TILES;
    static_assert(N % CHUNK == 0, "tiles of columns come by CHUNK");
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = IN_PARTS ? 2 * t : t, second = IN_PARTS ? 2 * t + 1 : t + 4;
    const auto fragments = [&](Operand (&a)[M][4], int k) {
        #pragma unroll
        for (int m = 0; m < M; ++m)
            load_weights<TRANSPOSED>(
                a[m], shared, Grid::first_row() + m * 16, k + first, k + second);
    };
    const Element* upper = &b.at[first][Grid::first_column() + CHUNK * g];
    const Element* lower = &b.at[second][Grid::first_column() + CHUNK * g];
    constexpr int PITCH = COLUMNS + ROWS_PAD;
    if constexpr (IN_PARTS) {                               // tensor cores' sums restart from 0
        #pragma unroll
        for (int n = 0; n < N; n += CHUNK) {
            Element sum[M][CHUNK][4];
            set_zero<M, CHUNK>(sum);
            #pragma unroll 2
            for (int k = 0; k < K; k += 8) {
                Operand a[M][4];
                fragments(a, k);
                mma_chunks(sum, 0, a, upper + k * PITCH + n * 8, lower + k * PITCH + n * 8);
            }
            add_chunks(d, n, sum);
        }
    } else {
        #pragma unroll 2
        for (int k = 0; k < K; k += 8) {
            Operand a[M][4];
            fragments(a, k);
            #pragma unroll
            for (int n = 0; n < N; n += CHUNK)
                mma_chunks(d, n, a, upper + k * PITCH + n * 8, lower + k * PITCH + n * 8);
        }
    }
}

// The same over visible pairs only, on CUDA cores: for a partly masked tile whose B has a NaN or an
// infinity, since 0 * NaN is NaN. Slow, rare.
template <class Grid, bool TRANSPOSED, class Shared, int K, int COLUMNS>
__device__ __forceinline__ void add_visible(
    typename Grid::Sums& d, const Shared& shared, const SmemTile<K, COLUMNS>& b,
    const ScoreTile& score_tile) {
    #pragma unroll 1
    for (int k = 0; k < K; ++k)
        #pragma unroll
        for (int m = 0; m < Grid::M_TILES; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Grid::first_row() + m * 16
                              + (TRANSPOSED ? key_row(half) : query_row(half));
                const int query = TRANSPOSED ? k : row, key = TRANSPOSED ? row : k;
                if (!score_tile.visible(query, key)) continue;
                const Element weight = shared.weights.at[query][key];
                #pragma unroll
                for (int n = 0; n < Grid::N_TILES; ++n)
                    #pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        Element& sum = d[m][n][half * 2 + c];
                        const int column = Grid::column(n / CHUNK * CHUNK, c) + n % CHUNK;
                        sum = fma(weight, b.at[k][column], sum);
                    }
            }
}

template <class Grid, bool TRANSPOSED, bool MASKED, class Shared, int K, int COLUMNS>
__device__ __forceinline__ void gradient_gemm(
    typename Grid::Sums& d, const Shared& shared, const SmemTile<K, COLUMNS>& b,
    const ScoreTile& score_tile, bool nonfinite) {
    if (MASKED && nonfinite) add_visible<Grid, TRANSPOSED>(d, shared, b, score_tile);
    else weights_gemm<Grid, TRANSPOSED>(d, shared, b);
}

// Adds the lane's numbers of CHUNK tiles to a row of dQ: x[c] to CHUNK columns from first + CHUNK *
// (2t + c) on, t = lane % 4. exists: whether dQ has that row. Whole warp.
__device__ __forceinline__ void add_chunks_to_row(
    float* row, int first, int num_columns, bool aligned, bool exists, float (&x)[2][4]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int column = first + 4 * (threadIdx.x % 4 * 2 + c);
        if (exists && aligned && column + 4 <= num_columns) {
            reduce_add_4(row + column, x[c]);
            continue;
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (exists && column + i < num_columns) atomicAdd(row + column + i, x[c][i]);
    }
}

// Doubles are added one by one. The quad first transposes its 4 x 4 numbers, in two steps: lane t
// gets the t-th number of each lane, so the four lanes add to adjacent elements.
__device__ __forceinline__ void add_chunks_to_row(
    double* row, int first, int num_columns, bool, bool exists, double (&x)[2][2]) {
    const int t = threadIdx.x % 4;
    double transposed[4] = {x[0][0], x[0][1], x[1][0], x[1][1]};
    #pragma unroll
    for (int bit = 1; bit < 4; ++bit)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (bit == 3 || (i & bit)) continue;
            double &low = transposed[i], &high = transposed[i | bit];
            const double other = __shfl_xor_sync(WHOLE_WARP, t & bit ? low : high, bit);
            if (t & bit) low = other;
            else high = other;
        }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = first + 4 * i + t;
        if (exists && column < num_columns) atomicAdd(row + column, transposed[i]);
    }
}

// Adds the lane's sums to the rows of dQ from q_start on. Whole warp.
__device__ __forceinline__ void add_to_dq(
    const BackwardArguments& arrays, int batch, int head, int q_start,
    const QueryGrid::Sums& sums) {
    const Shape& shape = arrays.shape;
    const Strides stride = arrays.dq_stride;
    const bool aligned = rows_aligned(arrays.dq, stride);
    Element* dq = static_cast<Element*>(arrays.dq) + batch * stride.batch + head * stride.head;
    #pragma unroll
    for (int m = 0; m < QueryGrid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = q_start + QueryGrid::first_row() + m * 16 + query_row(half);
            #pragma unroll
            for (int n = 0; n < QueryGrid::N_TILES; n += CHUNK) {
                Element numbers[2][CHUNK];
                chunk_of_tiles(numbers[0], sums[m], n, half * 2);
                chunk_of_tiles(numbers[1], sums[m], n, half * 2 + 1);
                add_chunks_to_row(dq + query * stride.token, QueryGrid::first_column() + n * 8,
                                  shape.head_dim, aligned, query < shape.seqlen_q, numbers);
            }
        }
}

// Stores the lane's part of dK or dV.
template <class Grid>
__device__ __forceinline__ void store_gradient(
    const typename Grid::Sums& sums, void* target, const Strides& stride, TileCoord coord,
    int seqlen, int num_columns) {
    const bool aligned = rows_aligned(target, stride);
    Element* rows = static_cast<Element*>(target) + coord.batch * stride.batch
                  + coord.head * stride.head;
    #pragma unroll
    for (int m = 0; m < Grid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = coord.tile * BLOCK_K + Grid::first_row() + m * 16 + key_row(half);
            if (key >= seqlen) continue;
            #pragma unroll
            for (int n = 0; n < Grid::N_TILES; n += CHUNK)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    Element numbers[CHUNK];
                    chunk_of_tiles(numbers, sums[m], n, half * 2 + c);
                    store_chunk(rows + key * stride.token, Grid::column(n, c), num_columns,
                                aligned, numbers);
                }
        }
}
