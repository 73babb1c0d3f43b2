// Backward attention for float, in full precision: dQ, dK and dV by fused multiply-adds on register
// tiles.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = scale P (dP - delta)
//     dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691), as in sm80/backward.cu: a block computes BLOCK_K
// keys of one key head. It visits the query tiles that see them, of every query head of the group,
// and keeps dK and dV in registers. It adds its part of dQ to dQ in global memory. prepare/delta.cu
// has zeroed dQ and computed delta = rowsum(dO * O) - dlse.
//
// Grid: tiles of BLOCK_K keys of all (batch, key head) pairs (scheduler.cuh), in ascending order:
// if CAUSAL, the first tiles are seen by the most queries. Block: NUM_WARPS warps, SCORE_WARPS_Q of
// them along the queries of S, dP and dQ, GRADIENT_WARPS_K along the keys of dK and dV; fma.cuh
// says which lane holds which numbers.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, GRADIENT_WARPS_K,
// BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to multiples
// of 32; DETERMINISTIC: the blocks of one head add to a query tile's dQ in the order of their key
// tiles; Arguments and the options (docs/guide/options.md). With score modifications, scale S above
// stands for the score (score_mod.cuh), and dS / scale for the gradient with respect to scale S
// before them. Shared memory, in floats:
//     k  BLOCK_K * (HEAD_DIM + 4)              v     BLOCK_K * (HEAD_DIM_V + 4)
//     q  BLOCK_Q * (HEAD_DIM + 4)              dout  BLOCK_Q * (HEAD_DIM_V + 4)
//     weights  BLOCK_Q * (BLOCK_K + 8)         biases, then P, then dS; in column BLOCK_K rests
//     lse, delta  BLOCK_Q each
// The next dO loads while dQ and dK are computed, the next Q, and biases, while dP is: six barriers
// per iteration. All products load from shared memory one step ahead (loads_ahead.cuh).
//
// Bad at: few keys with many queries (one block per key tile); head_dim above 128, where only small
// tiles fit in shared memory.
#include "fma/bias_tiles.cuh"
#include "fma/key_rows.cuh"
#include "fma/loads_ahead.cuh"
#include "common/backward_loads.cuh"
#include "common/key_tile.cuh"
#include "common/packed_sequences.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    WeightTile<BLOCK_Q, BLOCK_K> weights;
    float lse[BLOCK_Q], delta[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// The thread's rows among those that it has loaded, before a barrier: lse becomes effective_lse(),
// and its rest (lse_rest.cuh) goes to the padding of weights. So lanes need not compute them, 32
// times each.
__device__ __forceinline__ void prepare_rows(SharedPlan& shared, const ScoreTile& score_tile) {
    if constexpr (HAS_LSE_RESTS)
        #pragma unroll
        for (int first = 0; first < BLOCK_Q; first += THREADS) {
            const int row = first + threadIdx.x;
            if (row >= BLOCK_Q) continue;
            const float lse = effective_lse(shared.lse[row]);
            shared.lse[row] = lse;
            shared.weights.at[row][BLOCK_K] = score_tile.rest(row, lse);
        }
}

// P = exp(scale S - lse) and dS = scale P (dP - delta) replace S and dP; both are 0 for masked
// pairs. With dropout, P Z and dS = scale P (Z dP - delta).
template <bool MASKED>
__device__ __forceinline__ void compute_p_and_ds(
    Scores& s, Scores& dp, const SharedPlan& shared, const ScoreTile& score_tile) {
    constexpr int ROWS = ScoreGrid::WARP_ROWS / LANE_ROWS;
    constexpr int KEYS = ScoreGrid::WARP_COLUMNS / LANE_COLUMNS;
    const float scale = score_tile.score_mod.scale;
    const int first_key = ScoreGrid::first_column() + lane_column();
    using Pairs = LaneGrid<LaneAxis<ROWS, 1, LANE_ROWS, ROW_LANES>,
                           LaneAxis<KEYS, 1, LANE_COLUMNS, COLUMN_LANES>>;
    Pairs pairs{};
    if constexpr (DMOD)
        pairs = {score_tile.q_start + ScoreGrid::first_row() + lane_row(),
                 score_tile.k_start + first_key};
    ScoreMod<float>::ArraySums<Pairs> sums;
    Kept<ROWS, KEYS> kept;
    if constexpr (DROPOUT)
        find_kept(kept, score_tile.dropout, score_tile.q_start + ScoreGrid::first_row(),
                  score_tile.k_start + ScoreGrid::first_column());
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = ScoreGrid::first_row() + lane_row() + i * LANE_ROWS;
        const float lse = HAS_LSE_RESTS ? shared.lse[row] : effective_lse(shared.lse[row]);
        const float rest = HAS_LSE_RESTS ? shared.weights.at[row][BLOCK_K] : 0.0f;
        const float delta = shared.delta[row], distance = score_tile.distance(row, first_key);
        float* dbias = nullptr;
        if constexpr (STORES_DBIAS)
            dbias = score_tile.dbias.row(score_tile.q_start + row, score_tile.k_start + first_key);
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int key = first_key + j * LANE_COLUMNS;
            const bool visible = !MASKED || score_tile.visible(row, key);
            Derivatives<float> derivatives;
            if constexpr (LINEAR) {
                s[i][j] = weight(s[i][j], scale, lse);
            } else {
                const int query = score_tile.q_start + row, of_key = score_tile.k_start + key;
                const float bias = STAGES_BIASES ? shared.weights.at[row][key]
                                                 : score_tile.score_mod.bias_of(query, of_key);
                const float score = score_tile.score_mod.score(
                    s[i][j], bias, distance - static_cast<float>(j * LANE_COLUMNS), query, of_key,
                    derivatives);
                s[i][j] = weight_beside(rest, score, lse);
            }
            const float z = DROPOUT && !kept.at(i, j) ? 0.0f : score_tile.dropout.factor;
            const auto gradient = [&] {                     // of a visible pair
                const float ds = s[i][j] * ((DROPOUT ? z * dp[i][j] : dp[i][j]) - delta);
                if constexpr (STORES_DBIAS)
                    dbias[j * LANE_COLUMNS] = ds;
                else
                    score_tile.add_dbias(
                        derivatives, ds, score_tile.q_start + row, score_tile.k_start + key);
                score_tile.score_mod.add_gradients(sums, pairs, i, j, derivatives, ds);
                return BENDS ? ds * derivatives.by_product : ds;
            };
            dp[i][j] = visible ? gradient() * scale : 0.0f;
            if (DBIAS && !visible)
                score_tile.dbias.add_masked(score_tile.q_start + row, score_tile.k_start + key);
            if constexpr (DROPOUT) s[i][j] *= z;
            if (!visible) s[i][j] = 0.0f;
        }
    }
    score_tile.score_mod.finish_gradients(sums, pairs);
}

// Computes dP and S of a query tile, once dO and then Q have arrived; they become dS and P.
// dout_nonfinite, q_nonfinite: dO, or Q, contains a NaN or an infinity, so the gradient matmuls
// must test the visibility of each pair (barrier_or_nonfinite).
template <bool MASKED>
__device__ __forceinline__ void compute_scores(
    SharedPlan& shared, const ScoreTile& score_tile, Scores& s, Scores& ds, bool& dout_nonfinite,
    bool& q_nonfinite) {
    cp_async_wait<1>();                                     // dO; in the first iteration, K and V
    prepare_rows(shared, score_tile);
    dout_nonfinite = barrier_or_nonfinite<MASKED>(shared.dout);
    gemm_abt_ahead<true>(
        ds, shared.dout, ScoreGrid::first_row(), shared.v, ScoreGrid::first_column());
    cp_async_wait<0>();                                     // Q, biases
    q_nonfinite = barrier_or_nonfinite<MASKED>(shared.q);
    gemm_abt_ahead<false>(
        s, shared.q, ScoreGrid::first_row(), shared.k, ScoreGrid::first_column());
    compute_p_and_ds<MASKED>(s, ds, shared, score_tile);
}

// Copies biases of one query tile after another, with its Q.
struct BiasLoader {
    SharedPlan& shared;
    const Arguments& args;
    int batch, k_start, end_head;

    __device__ __forceinline__ void load(int head, int tile) const {
        if constexpr (STAGES_BIASES) {
            if (head >= end_head) return;
            HeadBias<float> biases;
            biases.set_head(args, batch, head);
            load_biases<AllThreads, BLOCK_Q, BLOCK_K>(
                shared.weights.at, biases, tile * BLOCK_Q, k_start);
        }
    }
};

using Loader = QueryLoader<SharedPlan, true>;

// Starts the loads of the first query tile. Returns whether K contains a NaN or an infinity, so
// that dQ's matmul must test the visibility of each pair (barrier_or_nonfinite).
__device__ __forceinline__ bool load_first_queries(
    SharedPlan& shared, const Loader& loader, const BiasLoader& bias_loader, int head, int tile) {
    bool k_nonfinite = false;
    loader.load_dout(head, tile);
    bias_loader.load(head, tile);
    loader.load_q(head, tile);
    if constexpr (PAIRWISE) {
        cp_async_wait<1>();                                 // K
        k_nonfinite = barrier_or_nonfinite<true>(shared.k);
    }
    return k_nonfinite;
}

// dQ = dS K of query tile q_tile, added to dQ.
template <bool MASKED>
__device__ __forceinline__ void add_dq(
    DqSemaphore<>& dq_semaphore, SharedPlan& shared, const BackwardArguments& arrays,
    const ScoreTile& score_tile, TileCoord coord, int head, int q_tile, int num_q_tiles,
    bool k_nonfinite) {
    QueryGrid::Sums dq;
    set_zero(dq);
    gemm_ab_ahead<MASKED, BLOCK_K>(
        dq, shared.weights.at + QueryGrid::first_row(), shared.k, 0, QueryGrid::first_column(),
        [&](int i, int key) {
            return score_tile.visible(QueryGrid::first_row() + lane_row() + i * LANE_ROWS, key);
        },
        k_nonfinite);
    add_to_dq_in_order(dq_semaphore, arrays, score_tile, coord, head, q_tile, num_q_tiles, dq);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_fma(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the key tile, and the query tiles that see it.
    const Shape& call_shape = arrays_of(call_args).shape;
    const int num_k_tiles = num_key_tiles(call_args, BLOCK_K);
    const int num_q_tiles = num_query_tiles(call_args, BLOCK_Q);
    const int group_size = call_shape.num_heads_q / call_shape.num_heads_kv;
    TileCoord coord = key_tile_of_block(call_args, num_k_tiles, shared_bytes);
    const auto sequence = sequence_of_block<true>(call_args, coord.tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    ScoreTile score_tile(args, coord.batch, coord.tile);
    const QueryTiles tiles = score_tile.mask.query_tiles(score_tile.k_start, BLOCK_Q, BLOCK_K);
    score_tile.set_group(coord.head * group_size);
    const QueryOrder order(score_tile.pair_mask, tiles, coord.tile);
    const int first_head = coord.head * group_size, end_head = first_head + group_size;
    const int num_keys = shape.seqlen_k - score_tile.k_start;
    const Loader loader{shared, args, arrays, shape, coord, end_head};
    const BiasLoader bias_loader{shared, args, coord.batch, score_tile.k_start, end_head};

    clear_padding(shared.k, shared.v, shared.q, shared.dout);
    KeyGrid::Sums dk;
    ValueGrid::Sums dv;
    set_zero(dk);
    set_zero(dv);

    // Main loop, one query tile per iteration. The loads of its dO and Q have been started.
    bool k_nonfinite = false;
    DqSemaphore<> dq_semaphore;
    const auto iterate = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const int tile_after = order.after(tile);
        const bool last_tile = !order.has(tile_after);
        const int next_head = head + last_tile, next_tile = last_tile ? order.first : tile_after;
        score_tile.q_start = tile * BLOCK_Q;

        Scores s, ds;                                       // S, then P; dP, then dS
        bool dout_nonfinite, q_nonfinite;
        compute_scores<MASKED>(shared, score_tile, s, ds, dout_nonfinite, q_nonfinite);

        write_weights(shared.weights.at, ScoreGrid::first_row(), ScoreGrid::first_column(), s);
        __syncthreads();                                    // P is written
        gemm_atb_ahead<MASKED>(
            dv, shared.weights.at, ValueGrid::first_row(), shared.dout, ValueGrid::first_column(),
            KeyVisibility{score_tile, ValueGrid::first_row()}, dout_nonfinite);
        __syncthreads();                                    // P and dO are free

        loader.load_dout(next_head, next_tile);
        write_weights(shared.weights.at, ScoreGrid::first_row(), ScoreGrid::first_column(), ds);
        __syncthreads();                                    // dS is written
        add_dq<MASKED>(
            dq_semaphore, shared, arrays, score_tile, coord, head, tile, num_q_tiles, k_nonfinite);
        gemm_atb_ahead<MASKED>(
            dk, shared.weights.at, KeyGrid::first_row(), shared.q, KeyGrid::first_column(),
            KeyVisibility{score_tile, KeyGrid::first_row()}, q_nonfinite);
        __syncthreads();                                    // dS and Q are free
        dq_semaphore.release();
        bias_loader.load(next_head, next_tile);
        loader.load_q(next_head, next_tile);
    };

    if (order.has(order.first)) {
        load_keys(shared, arrays, coord, score_tile.k_start, num_keys);
        k_nonfinite = load_first_queries(shared, loader, bias_loader, first_head, order.first);
        for (int head = first_head; head < end_head; ++head) {
            score_tile.set_head(args, coord.batch, head);
            for (int tile = order.first; order.has(tile); tile = order.after(tile))
                if (score_tile.full(tiles, tile)) iterate(Bool<false>{}, head, tile);
                else iterate(Bool<true>{}, head, tile);
        }
    }

    // Epilogue.
    store_gradient<KeyGrid>(dk, arrays.dk, arrays.dk_stride, coord, shape.seqlen_k, shape.head_dim);
    store_gradient<ValueGrid>(
        dv, arrays.dv, arrays.dv_stride, coord, shape.seqlen_k, shape.head_dim_v);
}
