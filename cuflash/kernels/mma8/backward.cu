// Backward attention by mma.sync in steps of 8: for double, where tensor cores multiply doubles
// (sm_80, sm_90, sm_100, sm_103), and for float in parts (precision "tf32x3", sm_80 and newer).
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = scale P (dP - delta)
//     dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691), as fma/backward.cu: one block has BLOCK_K keys
// of one key head. It walks the query tiles that see them, of every query head of the
// group, and keeps dK and dV in registers. Its share of dQ it adds to dQ in global memory, which
// prepare/delta.cu has cleared; delta = rowsum(dO * O) comes from there too.
//
// Grid: tiles of BLOCK_K keys of all (batch, key head) pairs (scheduler.cuh), the first tiles
// first: if CAUSAL, most queries see those.
// Block: NUM_WARPS warps, SCORE_WARPS_Q of them along the queries of S, dP and dQ,
// GRADIENT_WARPS_K along the keys of dK and dV.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, GRADIENT_WARPS_K,
// BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to
// multiples of 32; DETERMINISTIC: the blocks of one head add to a query tile's dQ in the order of
// their key tiles; Arguments and the options (docs/masks.md): with them scale S above stands for
// the score that score_mod.cuh makes of it, and dS for the gradient by S.
// Shared memory, in elements:
//     k  BLOCK_K * (HEAD_DIM + 4)              v     BLOCK_K * (HEAD_DIM_V + 4)
//     q  BLOCK_Q * (HEAD_DIM + 4)              dout  BLOCK_Q * (HEAD_DIM_V + 4)
//     weights  BLOCK_Q * (BLOCK_K + 4)         P, then dS
//     lse, delta  BLOCK_Q each
// The next dO is under way while dQ and dK are computed, and the next Q while dP is: six barriers a
// step.
//
// Bad at: few keys with many queries (one block a key tile); head_dim above 128, where little fits
// into shared memory; NaN or infinity in a tile that the mask cuts.
#include "mma8/mma8.cuh"
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"
#include "score/score_tile.cuh"
#include "common/dq_semaphore.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    SmemTile<BLOCK_Q, BLOCK_K> weights;
    Element lse[BLOCK_Q], delta[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// How the warps share a ROWS x COLUMNS product, WARPS_DOWN of them along the rows.
template <int ROWS, int COLUMNS, int WARPS_DOWN> struct WarpGrid {
    static constexpr int WARPS_ACROSS = NUM_WARPS / WARPS_DOWN;
    static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
    static_assert(ROWS % (WARPS_DOWN * 16) == 0, "a warp's rows are 16-row tiles");
    static_assert(COLUMNS % (WARPS_ACROSS * 8) == 0, "a warp's columns are 8-column tiles");
    using Sums = Fragments<M_TILES, N_TILES>;
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
    }
    // Of a product whose columns are those of a tile: where chunk c, 0 or 1, of the CHUNK tiles
    // from n on begins.
    static __device__ __forceinline__ int column(int n, int c) {
        return first_column() + n * 8 + CHUNK * (threadIdx.x % 4 * 2 + c);
    }
};

using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q>;            // S, dP
using QueryGrid = WarpGrid<BLOCK_Q, HEAD_DIM, SCORE_WARPS_Q>;           // dQ
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV
using Scores = ScoreGrid::Sums;

// The lane's row i (0 or 1) of a 16-row tile of dQ, and of dK and dV, which have neighbours.
__device__ __forceinline__ int query_row(int i) { return threadIdx.x % 32 / 4 + i * 8; }
__device__ __forceinline__ int key_row(int i) { return threadIdx.x % 32 / 4 * 2 + i; }

// P = exp(scale S - lse) and dS = scale P (dP - delta), in the places of S and dP; 0 for pairs that
// do not count. With dropout P Z, and dS = scale P (Z dP - delta). lse = -inf says that all of the
// query's scores are -inf: P is 0.
template <bool MASKED>
__device__ __forceinline__ void weights(
    Scores& s, Scores& dp, const SharedPlan& shared, const ScoreTile& at, Element scale) {
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + m * 16 + query_row(half);
            const Element lse = effective_lse(shared.lse[row]);
            const Element delta = shared.delta[row];
            const int query = at.q_start + row;
            u32 kept = 0;
            if constexpr (DROPOUT)
                kept = at.dropout.kept_bits<ScoreGrid::N_TILES>(
                    query, at.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2);
            #pragma unroll
            for (int n = 0; n < ScoreGrid::N_TILES; ++n)
                #pragma unroll
                for (int x = half * 2; x < half * 2 + 2; ++x) {
                    const int key =
                        ScoreGrid::first_column() + n * 8 + threadIdx.x % 4 * 2 + x % 2;
                    const bool counts = !MASKED || at.visible(row, key);
                    Element &p = s[m][n][x], &ds = dp[m][n][x], derivative = 1;
                    if constexpr (LINEAR)
                        p = rounded(p, scale);
                    else
                        p = at.score_mod.score(
                            p, at.distance(row, key), at.score_mod.bias_of(query, at.k_start + key),
                            derivative);
                    p = exponential(p - lse);
                    Element z = 1;
                    if constexpr (DROPOUT)
                        z = (kept >> (n * 2 + x % 2)) & 1 ? at.dropout.factor : Element(0);
                    const Element dx = p * ((DROPOUT ? z * ds : ds) - delta);
                    if constexpr (DBIAS)
                        if (counts) at.dbias.add(query, at.k_start + key, dx);
                    ds = counts ? (SOFTCAP ? dx * derivative : dx) * scale : 0;
                    if (!counts) p = 0;
                    if constexpr (DROPOUT) p *= z;
                }
        }
}

__device__ __forceinline__ void write_weights(SharedPlan& shared, const Scores& x) {
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < ScoreGrid::N_TILES; ++n)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<Pair*>(
                    &shared.weights.at[ScoreGrid::first_row() + m * 16 + query_row(half)]
                                      [ScoreGrid::first_column() + n * 8 + threadIdx.x % 4 * 2]) =
                    Pair{x[m][n][half * 2], x[m][n][half * 2 + 1]};
}

// The weights' fragment of the sum's indices k.., for 16 rows of the product: queries or,
// TRANSPOSED, keys, two neighbours to a lane. The lane's indices are those of FIRST and SECOND.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_weights(
    Operand (&a)[4], const SharedPlan& shared, int row, int first, int second) {
    const int g = threadIdx.x % 32 / 4;
    if constexpr (TRANSPOSED) {
        const Pair upper = pair_at(&shared.weights.at[first][row + 2 * g]);
        const Pair lower = pair_at(&shared.weights.at[second][row + 2 * g]);
        a[0] = operand(upper.x);
        a[1] = operand(upper.y);
        a[2] = operand(lower.x);
        a[3] = operand(lower.y);
    } else {
        load_rows(a, &shared.weights.at[row + g][first], BLOCK_K + ROWS_PAD, second - first);
    }
}

// d += A B over K indices, for the warp's rows and columns of d: A is the weights, B a tile of as
// many rows as there are indices. A lane takes those two of eight whose rows of B lie in banks
// apart.
template <class Grid, bool TRANSPOSED, int K, int COLUMNS>
__device__ __forceinline__ void add_product(
    typename Grid::Sums& d, const SharedPlan& shared, const SmemTile<K, COLUMNS>& b) {
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
    if constexpr (IN_PARTS) {                               // the tensor cores' sums begin anew
        #pragma unroll
        for (int n = 0; n < N; n += CHUNK) {
            Element sum[M][CHUNK][4];
            set_zero<M, CHUNK>(sum);
            #pragma unroll 2
            for (int k = 0; k < K; k += 8) {
                Operand a[M][4];
                fragments(a, k);
                multiply_chunks(sum, 0, a, upper + k * PITCH + n * 8, lower + k * PITCH + n * 8);
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
                multiply_chunks(d, n, a, upper + k * PITCH + n * 8, lower + k * PITCH + n * 8);
        }
    }
}

// The same over visible pairs alone, without tensor cores: for a tile that the mask cuts and where
// B holds a NaN or an infinity, as 0 * NaN is NaN. Slow, rare.
template <class Grid, bool TRANSPOSED, int K, int COLUMNS>
__device__ __forceinline__ void add_visible(
    typename Grid::Sums& d, const SharedPlan& shared, const SmemTile<K, COLUMNS>& b,
    const ScoreTile& at) {
    #pragma unroll 1
    for (int k = 0; k < K; ++k)
        #pragma unroll
        for (int m = 0; m < Grid::M_TILES; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Grid::first_row() + m * 16
                              + (TRANSPOSED ? key_row(half) : query_row(half));
                const int query = TRANSPOSED ? k : row, key = TRANSPOSED ? row : k;
                if (!at.visible(query, key)) continue;
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

template <class Grid, bool TRANSPOSED, bool MASKED, int K, int COLUMNS>
__device__ __forceinline__ void gradient_product(
    typename Grid::Sums& d, const SharedPlan& shared, const SmemTile<K, COLUMNS>& b,
    const ScoreTile& at, bool nonfinite) {
    if (MASKED && nonfinite) add_visible<Grid, TRANSPOSED>(d, shared, b, at);
    else add_product<Grid, TRANSPOSED>(d, shared, b);
}

// Adds to a row of dQ what the lane has of CHUNK tiles: x[c] to CHUNK columns from first + CHUNK *
// (2t + c) on, where t = lane % 4. exists: whether there is such a row. By a whole warp.
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

// Doubles are added one by one. So that the four lanes of a quad add to neighbours, lane t gets the
// t-th of each lane's four: 4 x 4 numbers, transposed in two steps.
__device__ __forceinline__ void add_chunks_to_row(
    double* row, int first, int num_columns, bool, bool exists, double (&x)[2][2]) {
    const int t = threadIdx.x % 4;
    double turned[4] = {x[0][0], x[0][1], x[1][0], x[1][1]};
    #pragma unroll
    for (int bit = 1; bit < 4; ++bit)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (bit == 3 || (i & bit)) continue;
            double &low = turned[i], &high = turned[i | bit];
            const double other = __shfl_xor_sync(WHOLE_WARP, t & bit ? low : high, bit);
            if (t & bit) low = other;
            else high = other;
        }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = first + 4 * i + t;
        if (exists && column < num_columns) atomicAdd(row + column, turned[i]);
    }
}

// Adds the lane's sums to the rows of dQ from q_start on. By a whole warp.
__device__ __forceinline__ void add_to_dq(
    const BackwardArguments& arguments, int batch, int head, int q_start,
    const QueryGrid::Sums& sums) {
    const Shape& shape = arguments.shape;
    const Strides stride = arguments.dq_stride;
    const bool aligned = rows_aligned(arguments.dq, stride);
    Element* dq = static_cast<Element*>(arguments.dq) + batch * stride.batch + head * stride.head;
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
    const typename Grid::Sums& sums, void* target, const Strides& stride, TileCoord where,
    int seqlen, int num_columns) {
    const bool aligned = rows_aligned(target, stride);
    Element* rows = static_cast<Element*>(target) + where.batch * stride.batch
                  + where.head * stride.head;
    #pragma unroll
    for (int m = 0; m < Grid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = where.tile * BLOCK_K + Grid::first_row() + m * 16 + key_row(half);
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_mma8(const __grid_constant__ Arguments whole) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: which keys; which query tiles see them.
    const Shape& grid = arrays_of(whole).shape;
    const int num_k_tiles = num_key_tiles(whole, BLOCK_K);
    const int num_q_tiles = num_query_tiles(whole, BLOCK_Q);
    const int group_size = grid.num_heads_q / grid.num_heads_kv;
    TileCoord where = tile_of_block(
        block_ticket(arrays_of(whole).turns, shared_bytes), num_k_tiles, grid.num_heads_kv,
        grid.batch, arrays_of(whole).schedule);
    const auto sequence = sequence_of_block<true>(whole, where.tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = of_sequence(whole, sequence, BLOCK_Q);
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const Element scale = static_cast<Element>(arguments.scale);
    ScoreTile at(args, where.batch, where.tile);
    const QueryTiles tiles = at.mask.query_tiles(at.k_start, BLOCK_Q, BLOCK_K);
    const auto after = [&](int tile) {                      // the next of those that are visited
        return at.pair_mask.query_tile_after(tile, where.tile, tiles.end);
    };
    const int first_tile = SEGMENTS ? after(tiles.first - 1) : tiles.first;
    const int first_head = where.head * group_size, end_head = first_head + group_size;
    const int num_keys = shape.seqlen_k - at.k_start;

    // Each of these starts the copies of a query tile; each is one group.
    const auto load_dout = [&](int head, int tile) {
        if (head < end_head) {
            const int start = tile * BLOCK_Q, num_rows = shape.seqlen_q - start;
            const i64 stride = arguments.dout_stride.token;
            const i64 row =
                (static_cast<i64>(where.batch) * shape.num_heads_q + head) * rows_of_head(args)
                + start;
            load_tile(shared.dout,
                      head_start(arguments.dout, arguments.dout_stride, where.batch, head)
                          + start * stride,
                      stride, num_rows, shape.head_dim_v);
            constexpr int WORDS = sizeof(Element) / 4;      // copies are of 4 bytes
            for (int i = threadIdx.x; i < BLOCK_Q * WORDS; i += THREADS) {
                const int bytes = i / WORDS < num_rows ? 4 : 0;
                cp_async_4(shared_address(shared.lse) + i * 4,
                           static_cast<const u32*>(arguments.lse) + row * WORDS + i, bytes);
                cp_async_4(shared_address(shared.delta) + i * 4,
                           static_cast<const u32*>(arguments.delta) + row * WORDS + i, bytes);
            }
        }
        cp_async_commit();
    };
    const auto load_q = [&](int head, int tile) {
        if (head < end_head) {
            const int start = tile * BLOCK_Q;
            const i64 stride = arguments.q_stride.token;
            load_tile(shared.q,
                      head_start(arguments.q, arguments.q_stride, where.batch, head)
                          + start * stride,
                      stride, shape.seqlen_q - start, shape.head_dim);
        }
        cp_async_commit();
    };

    KeyGrid::Sums dk;
    ValueGrid::Sums dv;
    set_zero<KeyGrid::M_TILES, KeyGrid::N_TILES>(dk);
    set_zero<ValueGrid::M_TILES, ValueGrid::N_TILES>(dv);

    // One query tile. At its start dO and then Q are on their way.
    bool k_nonfinite = false;
    const auto step = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const int following = SEGMENTS ? after(tile) : tile + 1;
        const bool last_tile = following == tiles.end;
        const int next_head = head + last_tile, next_tile = last_tile ? first_tile : following;
        at.q_start = tile * BLOCK_Q;
        bool dout_nonfinite = false, q_nonfinite = false;

        Scores s, ds;
        cp_async_wait<1>();                                 // dO, and the first time K and V
        if constexpr (MASKED) dout_nonfinite = __syncthreads_or(loaded_nonfinite(shared.dout));
        else __syncthreads();
        row_products(ds, shared.dout, ScoreGrid::first_row(), shared.v, ScoreGrid::first_column());
        cp_async_wait<0>();                                 // Q
        if constexpr (MASKED) q_nonfinite = __syncthreads_or(loaded_nonfinite(shared.q));
        else __syncthreads();
        row_products(s, shared.q, ScoreGrid::first_row(), shared.k, ScoreGrid::first_column());
        weights<MASKED>(s, ds, shared, at, scale);

        write_weights(shared, s);
        __syncthreads();                                    // P is there
        gradient_product<ValueGrid, true, MASKED>(dv, shared, shared.dout, at, dout_nonfinite);
        __syncthreads();                                    // P and dO are done with

        load_dout(next_head, next_tile);
        write_weights(shared, ds);
        __syncthreads();                                    // dS is there
        QueryGrid::Sums dq;
        set_zero<QueryGrid::M_TILES, QueryGrid::N_TILES>(dq);
        gradient_product<QueryGrid, false, MASKED>(dq, shared, shared.k, at, k_nonfinite);
        int* turn = dq_semaphore(
            arguments.turns,
            (static_cast<i64>(where.batch) * shape.num_heads_q + head) * num_q_tiles + tile);
        // Turns are counted from the first key tile that visits the query tile.
        const int own_turn = DETERMINISTIC && (WINDOW || SEGMENTS)
            ? at.pair_mask.key_tiles_before(
                  tile, where.tile, at.mask.first_key(tile * BLOCK_Q) / BLOCK_K)
            : where.tile;
        if (DETERMINISTIC) semaphore_wait(turn, own_turn);
        add_to_dq(arguments, where.batch, head, at.q_start, dq);
        if (DETERMINISTIC) semaphore_release(turn, own_turn);
        gradient_product<KeyGrid, true, MASKED>(dk, shared, shared.q, at, q_nonfinite);
        __syncthreads();                                    // dS and Q are done with
        load_q(next_head, next_tile);
    };

    if (first_tile < tiles.end) {
        const i64 k_step = arguments.k_stride.token, v_step = arguments.v_stride.token;
        load_tile(shared.k,
                  head_start(arguments.k, arguments.k_stride, where.batch, where.head)
                      + at.k_start * k_step,
                  k_step, num_keys, shape.head_dim);
        load_tile(shared.v,
                  head_start(arguments.v, arguments.v_stride, where.batch, where.head)
                      + at.k_start * v_step,
                  v_step, num_keys, shape.head_dim_v);
        load_dout(first_head, first_tile);
        load_q(first_head, first_tile);
        cp_async_wait<1>();
        k_nonfinite = __syncthreads_or(loaded_nonfinite(shared.k));
        for (int head = first_head; head < end_head; ++head) {
            at.set_head(args, where.batch, head);
            for (int tile = first_tile; tile < tiles.end; tile = SEGMENTS ? after(tile) : tile + 1)
                if (PAIRWISE ? at.full(tiles, tile) : tiles.full(tile))
                    step(Bool<false>{}, head, tile);
                else
                    step(Bool<true>{}, head, tile);
        }
    }

    store_gradient<KeyGrid>(
        dk, arguments.dk, arguments.dk_stride, where, shape.seqlen_k, shape.head_dim);
    store_gradient<ValueGrid>(
        dv, arguments.dv, arguments.dv_stride, where, shape.seqlen_k, shape.head_dim_v);
}
