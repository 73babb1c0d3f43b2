// Backward attention for float, in full precision: dQ, dK and dV by fused multiply-adds on register
// tiles.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = scale P (dP - delta)
//     dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691), as sm80/backward.cu: one block computes BLOCK_K keys
// of one key head. It walks the query tiles that see them, of every query head of the group, and
// keeps dK and dV in registers. Its share of dQ it adds to dQ in global memory, which
// prepare/delta.cu has cleared; delta = rowsum(dO * O) comes from there too.
//
// Grid: tiles of BLOCK_K keys of all (batch, key head) pairs (scheduler.cuh), the first tiles
// first: if CAUSAL, most queries see those.
// Block: NUM_WARPS warps, SCORE_WARPS_Q of them along the queries of S, dP and dQ,
// GRADIENT_WARPS_K along the keys of dK and dV; fma.cuh says which lane has which numbers.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, GRADIENT_WARPS_K,
// BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to
// multiples of 32; DETERMINISTIC: the blocks of one head add to a query tile's dQ in the order of
// their key tiles; Arguments and the options (docs/masks.md): with them scale S above stands for
// the score that score_mod.cuh makes of it, and dS / scale for the gradient by scale S.
// Shared memory, in floats:
//     k  BLOCK_K * (HEAD_DIM + 4)              v     BLOCK_K * (HEAD_DIM_V + 4)
//     q  BLOCK_Q * (HEAD_DIM + 4)              dout  BLOCK_Q * (HEAD_DIM_V + 4)
//     weights  BLOCK_Q * (BLOCK_K + 8)         P, then dS
//     lse, delta  BLOCK_Q each
// The next dO is under way while dQ and dK are computed, and the next Q while dP is: six barriers a
// step.
//
// Bad at: few keys with many queries (one block a key tile); head_dim above 128, where little fits
// into shared memory.
#include "fma/fma.cuh"
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"
#include "score/score_tile.cuh"
#include "common/dq_semaphore.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    WeightTile<BLOCK_Q, BLOCK_K> weights;
    float lse[BLOCK_Q], delta[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// How the warps share a ROWS x COLUMNS product, WARPS_DOWN of them along the rows.
template <int ROWS, int COLUMNS, int WARPS_DOWN> struct WarpGrid {
    static constexpr int WARPS_ACROSS = NUM_WARPS / WARPS_DOWN;
    static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static_assert(ROWS % (WARPS_DOWN * LANE_ROWS) == 0, "every lane has as many rows");
    static_assert(COLUMNS % (WARPS_ACROSS * LANE_COLUMNS) == 0, "every lane has as many columns");
    using Sums = float[WARP_ROWS / LANE_ROWS][WARP_COLUMNS / LANE_COLUMNS];
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
    }
};

using ScoreGrid = WarpGrid<BLOCK_Q, BLOCK_K, SCORE_WARPS_Q>;            // S, dP
using QueryGrid = WarpGrid<BLOCK_Q, HEAD_DIM, SCORE_WARPS_Q>;           // dQ
using KeyGrid = WarpGrid<BLOCK_K, HEAD_DIM, GRADIENT_WARPS_K>;          // dK
using ValueGrid = WarpGrid<BLOCK_K, HEAD_DIM_V, GRADIENT_WARPS_K>;      // dV
using Scores = ScoreGrid::Sums;

static_assert(QueryGrid::WARP_COLUMNS % 32 == 0, "a warp's columns of dQ are chunks of args lanes");
static_assert(KeyGrid::WARP_COLUMNS % 32 == 0, "a warp's columns of dK are chunks of args lanes");
static_assert(ValueGrid::WARP_COLUMNS % 32 == 0, "a warp's columns of dV are chunks of args lanes");
static_assert(KeyGrid::WARP_ROWS % 16 == 0, "a warp's keys are chunks of args lanes");

// P = exp(scale S - lse) and dS = scale P (dP - delta), in the places of S and dP; 0 for pairs that
// do not count. With dropout P becomes that of dV, and dP Z is in place of dP.
template <bool MASKED>
__device__ __forceinline__ void weights(
    Scores& s, Scores& dp, const SharedPlan& shared, const ScoreTile& at) {
    constexpr int ROWS = ScoreGrid::WARP_ROWS / LANE_ROWS;
    constexpr int KEYS = ScoreGrid::WARP_COLUMNS / LANE_COLUMNS;
    const float scale = at.score_mod.scale;
    const int first_key = ScoreGrid::first_column() + lane_column();
    Kept<ROWS, KEYS> kept;
    if constexpr (DROPOUT)
        find_kept(kept, at.dropout, at.q_start + ScoreGrid::first_row(),
                  at.k_start + ScoreGrid::first_column());
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = ScoreGrid::first_row() + lane_row() + i * LANE_ROWS;
        const float lse = effective_lse(shared.lse[row]);
        const float delta = shared.delta[row];
        const float distance = at.distance(row, first_key);
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int key = first_key + j * LANE_COLUMNS;
            const bool counts = !MASKED || at.visible(row, key);
            float derivative = 1.0f;
            if constexpr (LINEAR) {
                s[i][j] = weight(s[i][j], scale, lse);
            } else {
                const float score = at.score_mod.score(
                    s[i][j], distance - static_cast<float>(j * LANE_COLUMNS),
                    at.score_mod.bias_of(at.q_start + row, at.k_start + key), derivative);
                s[i][j] = weight(score, 1.0f, lse);
            }
            const float z = DROPOUT && !kept.at(i, j) ? 0.0f : at.dropout.factor;
            const auto gradient = [&] {                     // of a pair that counts
                const float ds = s[i][j] * ((DROPOUT ? z * dp[i][j] : dp[i][j]) - delta);
                if constexpr (DBIAS) at.dbias.add(at.q_start + row, at.k_start + key, ds);
                return SOFTCAP ? ds * derivative : ds;
            };
            dp[i][j] = counts ? gradient() * scale : 0.0f;
            if constexpr (DROPOUT) s[i][j] *= z;
            if (!counts) s[i][j] = 0.0f;
        }
    }
}

// Adds the lane's sums to the rows of dQ from q_start on.
__device__ __forceinline__ void add_to_dq(
    const BackwardArguments& arguments, int batch, int head, int q_start,
    const QueryGrid::Sums& sums) {
    const Shape& shape = arguments.shape;
    const Strides stride = arguments.dq_stride;
    const bool aligned = rows_aligned(arguments.dq, stride);
    float* dq = static_cast<float*>(arguments.dq) + batch * stride.batch + head * stride.head;
    #pragma unroll
    for (int i = 0; i < QueryGrid::WARP_ROWS / LANE_ROWS; ++i) {
        const int query = q_start + QueryGrid::first_row() + lane_row() + i * LANE_ROWS;
        if (query >= shape.seqlen_q) continue;
        float* row = dq + query * stride.token;
        #pragma unroll
        for (int n = 0; n < QueryGrid::WARP_COLUMNS / LANE_COLUMNS; n += CHUNK) {
            const int column = QueryGrid::first_column() + lane_column() * CHUNK + n * 8;
            const float four[CHUNK] = {sums[i][n], sums[i][n + 1], sums[i][n + 2], sums[i][n + 3]};
            if (aligned && column + CHUNK <= shape.head_dim) {
                reduce_add_4(row + column, four);
                continue;
            }
            #pragma unroll
            for (int c = 0; c < CHUNK; ++c)
                if (column + c < shape.head_dim) atomicAdd(row + column + c, four[c]);
        }
    }
}

// Stores the lane's chunks of dK or dV.
template <class Grid>
__device__ __forceinline__ void store_gradient(
    const typename Grid::Sums& sums, void* target, const Strides& stride, TileCoord where,
    int seqlen, int num_columns) {
    const bool aligned = rows_aligned(target, stride);
    float* rows = static_cast<float*>(target) + where.batch * stride.batch
                + where.head * stride.head;
    #pragma unroll
    for (int i = 0; i < Grid::WARP_ROWS / LANE_ROWS; ++i) {
        const int key = where.tile * BLOCK_K + Grid::first_row() + lane_row() * CHUNK
                      + i / CHUNK * (LANE_ROWS * CHUNK) + i % CHUNK;
        if (key >= seqlen) continue;
        #pragma unroll
        for (int n = 0; n < Grid::WARP_COLUMNS / LANE_COLUMNS; n += CHUNK) {
            const float four[CHUNK] = {sums[i][n], sums[i][n + 1], sums[i][n + 2], sums[i][n + 3]};
            store_chunk(rows + key * stride.token,
                        Grid::first_column() + lane_column() * CHUNK + n * 8, num_columns, aligned,
                        four);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_fma(const __grid_constant__ Arguments whole) {
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
    ScoreTile at(args, where.batch, where.tile);
    const QueryTiles tiles = at.mask.query_tiles(at.k_start, BLOCK_Q, BLOCK_K);
    const auto after = [&](int tile) {
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
            for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
                const int bytes = i < num_rows ? 4 : 0;
                cp_async_4(shared_address(&shared.lse[i]),
                           static_cast<const float*>(arguments.lse) + row + i, bytes);
                cp_async_4(shared_address(&shared.delta[i]),
                           static_cast<const float*>(arguments.delta) + row + i, bytes);
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
    set_zero(dk);
    set_zero(dv);

    // One query tile. At its start dO and then Q are on their way.
    bool k_nonfinite = false;
    const auto step = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const int tile_after = after(tile);
        const bool last_tile = tile_after == tiles.end;
        const int next_head = head + last_tile, next_tile = last_tile ? first_tile : tile_after;
        at.q_start = tile * BLOCK_Q;
        const auto of_keys = [&](int first_key) {
            return [&, first_key](int i, int row) {         // the lane's key i, query `row`
                return at.visible(row, first_key + lane_row() * CHUNK
                                       + i / CHUNK * (LANE_ROWS * CHUNK) + i % CHUNK);
            };
        };

        Scores s, ds;
        cp_async_wait<1>();                                 // dO, and the first time K and V
        const bool dout_nonfinite = barrier_or_nonfinite<MASKED>(shared.dout);
        row_products(ds, shared.dout, ScoreGrid::first_row(), shared.v, ScoreGrid::first_column());
        cp_async_wait<0>();                                 // Q
        const bool q_nonfinite = barrier_or_nonfinite<MASKED>(shared.q);
        row_products(s, shared.q, ScoreGrid::first_row(), shared.k, ScoreGrid::first_column());
        weights<MASKED>(s, ds, shared, at);

        write_weights(shared.weights.at, ScoreGrid::first_row(), ScoreGrid::first_column(), s);
        __syncthreads();                                    // P is there
        add_weighted_rows_transposed<MASKED>(
            dv, shared.weights.at, ValueGrid::first_row(), shared.dout, ValueGrid::first_column(),
            of_keys(ValueGrid::first_row()), dout_nonfinite);
        __syncthreads();                                    // P and dO are done with

        load_dout(next_head, next_tile);
        write_weights(shared.weights.at, ScoreGrid::first_row(), ScoreGrid::first_column(), ds);
        __syncthreads();                                    // dS is there
        QueryGrid::Sums dq;
        set_zero(dq);
        add_weighted_rows<MASKED, BLOCK_K>(
            dq, shared.weights.at + QueryGrid::first_row(), shared.k, 0, QueryGrid::first_column(),
            [&](int i, int key) {
                return at.visible(QueryGrid::first_row() + lane_row() + i * LANE_ROWS, key);
            },
            k_nonfinite);
        int* turn = dq_semaphore(
            arguments.turns,
            (static_cast<i64>(where.batch) * shape.num_heads_q + head) * num_q_tiles + tile);
        // Turns are counted from the first key tile that visits the query tile.
        const int own_turn = DETERMINISTIC && (WINDOW || SEGMENTS)
            ? at.pair_mask.key_tiles_before(tile, where.tile, at.mask.first_key(at.q_start) / BLOCK_K)
            : where.tile;
        if (DETERMINISTIC) semaphore_wait(turn, own_turn);
        add_to_dq(arguments, where.batch, head, at.q_start, dq);
        if (DETERMINISTIC) semaphore_release(turn, own_turn);
        add_weighted_rows_transposed<MASKED>(
            dk, shared.weights.at, KeyGrid::first_row(), shared.q, KeyGrid::first_column(),
            of_keys(KeyGrid::first_row()), q_nonfinite);
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
        if constexpr (PAIRWISE) {
            cp_async_wait<1>();                             // K
            k_nonfinite = barrier_or_nonfinite<true>(shared.k);
        }
        for (int head = first_head; head < end_head; ++head) {
            at.set_head(args, where.batch, head);
            for (int tile = first_tile; tile < tiles.end; tile = after(tile))
                if (at.full(tiles, tile)) step(Bool<false>{}, head, tile);
                else step(Bool<true>{}, head, tile);
        }
    }

    store_gradient<KeyGrid>(
        dk, arguments.dk, arguments.dk_stride, where, shape.seqlen_k, shape.head_dim);
    store_gradient<ValueGrid>(
        dv, arguments.dv, arguments.dv_stride, where, shape.seqlen_k, shape.head_dim_v);
}
