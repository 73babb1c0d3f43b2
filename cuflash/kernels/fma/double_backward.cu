// The gradient of backward attention for float, in full precision: fused multiply-adds on register
// tiles.
//
// The cotangents of dq, dk, dv, dbias and dsink are a direction, in which scores move with W, lse
// with b and O with ddO (fma/jvp.cu). With
//
//     S = Q K^T,  W = ddQ K^T + Q ddK^T,  P = exp(scale S - lse)
//     dP = dO V^T,  U = dO ddV^T,  dS = P (dP - delta),  delta_dot = rowsum(dO * ddO)
//     T = dS (scale W - b) + P (U - delta_dot)
//
// the second gradients are (docs/guide/derivatives.md)
//
//     d2V = (P (scale W - b))^T dO,  d2K = scale (T^T Q + dS^T ddQ),  d2Q = scale (T K + dS ddK)
//
// A block computes BLOCK_K keys of one key head as in fma/backward.cu, with the cotangents' tiles
// beside those of Q, K and V. It adds its part of d2Q to d2Q in global memory.
// prepare/double_delta.cu has zeroed d2Q and computed delta and delta_dot; b and ddO are a JVP's.
//
// Grid and block: those of fma/backward.cu.
// Constants: those of fma/backward.cu; Q_DOT to MOD_DOT: which gradients the
// loss depends on. Score modifications, where scale S stands for the score, and dropout change the
// terms as in simt/double_backward.cuh. Shared memory, in floats:
//     k, k_dot  BLOCK_K * (HEAD_DIM + 4) each      v, v_dot  BLOCK_K * (HEAD_DIM_V + 4) each
//     q, q_dot  BLOCK_Q * (HEAD_DIM + 4) each      dout      BLOCK_Q * (HEAD_DIM_V + 4)
//     weights, ds  BLOCK_Q * (BLOCK_K + 8) each    P (scale W - b), then T; dS
//     lse, delta, b, delta_dot  BLOCK_Q each
// The next dO loads while d2Q and d2K are computed, the next Q and ddQ while dP and U are: six
// barriers per iteration.
//
// Bad at: few keys with many queries (one block per key tile); head_dim above 64, where shared
// memory has room for small tiles only: with 4 x 2 scores a lane, 12 loads of 16 bytes are 96
// multiply-adds.
#include "fma/key_rows.cuh"
#include "fma/tangents.cuh"
#include "common/backward_loads.cuh"
#include "common/key_tile.cuh"
#include "common/packed_sequences.cuh"
#include "score/tangents.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot;
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    WeightTile<BLOCK_Q, BLOCK_K> weights, ds;
    float lse[BLOCK_Q], delta[BLOCK_Q], b[BLOCK_Q], delta_dot[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// The tiles of K, V, ddK and ddV; they join the first cp.async group.
__device__ __forceinline__ void load_key_tiles(
    SharedPlan& shared, const Arguments& args, TileCoord coord, int k_start, int num_keys) {
    const BackwardArguments& arrays = arrays_of(args);
    const TangentNumbers& moves = args.tangents;
    load_keys(shared, arrays, coord, k_start, num_keys);
    if constexpr (K_DOT)
        load_tile(shared.k_dot,
                  head_start(args.k_dot, moves.k_dot, 0, coord.batch, coord.head)
                      + k_start * moves.k_dot.token,
                  moves.k_dot.token, num_keys, arrays.shape.head_dim);
    if constexpr (V_DOT)
        load_tile(shared.v_dot,
                  head_start(args.v_dot, moves.v_dot, 0, coord.batch, coord.head)
                      + k_start * moves.v_dot.token,
                  moves.v_dot.token, num_keys, arrays.shape.head_dim_v);
}

// The loads of a query tile: dO and the rows' statistics, then Q and ddQ, one cp.async group each.
struct SecondLoader {
    const QueryLoader<SharedPlan>& plain;

    __device__ __forceinline__ void load_dout(int head, int tile) const {
        SharedPlan& shared = plain.shared;
        if (head < plain.end_head) {
            const int start = tile * BLOCK_Q, num_rows = plain.shape.seqlen_q - start;
            const i64 first = (static_cast<i64>(plain.coord.batch) * plain.shape.num_heads_q + head)
                            * rows_of_head(plain.args) + start;
            const u32* b = static_cast<const u32*>(plain.args.lse_dot) + first;
            const u32* delta_dot = static_cast<const u32*>(plain.args.delta_dot) + first;
            for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
                const int bytes = i < num_rows ? 4 : 0;
                cp_async_4(shared_address(shared.b + i), b + i, bytes);
                cp_async_4(shared_address(shared.delta_dot + i), delta_dot + i, bytes);
            }
        }
        plain.load_dout(head, tile);
    }
    __device__ __forceinline__ void load_q(int head, int tile) const {
        if constexpr (Q_DOT) {
            const DirectionStrides& stride = plain.args.tangents.q_dot;
            const int start = tile * BLOCK_Q;
            if (head < plain.end_head)
                load_tile(plain.shared.q_dot,
                          head_start(plain.args.q_dot, stride, 0, plain.coord.batch, head)
                              + start * stride.token,
                          stride.token, plain.shape.seqlen_q - start, plain.shape.head_dim);
        }
        plain.load_q(head, tile);
    }
};

// Starts the loads of the keys and of the first query tile. Returns whether K or ddK contains a NaN
// or an infinity.
__device__ __forceinline__ bool load_first_tiles(
    const SecondLoader& loader, int k_start, int head, int tile) {
    const QueryLoader<SharedPlan>& plain = loader.plain;
    load_key_tiles(plain.shared, plain.args, plain.coord, k_start, plain.shape.seqlen_k - k_start);
    loader.load_dout(head, tile);
    loader.load_q(head, tile);
    if constexpr (!PAIRWISE) return false;
    cp_async_wait<1>();                                     // K and ddK
    return barrier_or_nonfinite_all<true, K_DOT>(plain.shared.k, one(plain.shared.k_dot));
}

// The weights of one pair: of dO in d2V; scale T and scale dS by scale S, in d2Q and d2K.
struct SecondWeight { float p_dot, t, ds; };

// Of the tile's query `row` and key `key`: s = S, w = W, dp = dP, u = U. kept: whether dropout
// keeps the pair. add_to_arrays(motion, T, dS): for second gradients of the user's arrays.
template <class AddToArrays>
__device__ __forceinline__ SecondWeight second_weight(
    float s, float w, float dp, float u, const SharedPlan& shared, const ScoreTile& score_tile,
    const HeadTangent<float>& tangent, int row, int key, bool visible, bool kept,
    AddToArrays add_to_arrays) {
    const ScoreMod<float>& score_mod = score_tile.score_mod;
    const int i = score_tile.q_start + row, j = score_tile.k_start + key;
    const float lse = effective_lse(shared.lse[row]), x_dot = score_mod.scale * w;
    float p;
    Derivatives<float> derivatives;
    if constexpr (LINEAR) {
        p = weight(s, score_mod.scale, lse);
    } else {
        const float score = score_mod.score(
            s, score_tile.distance(row, key), i, j, derivatives);
        p = weight_beside(score_tile.rest(row, lse), score, lse);
    }
    if (!visible) return {0.0f, 0.0f, 0.0f};
    const float slope = derivatives.by_product;
    const float z = DROPOUT ? kept ? score_tile.dropout.factor : 0.0f : 1.0f;
    const PairMotion<float> motion = tangent.motion(score_mod, derivatives, s, x_dot, i, j);
    const float relative = motion.w - shared.b[row];
    const float ds = p * ((DROPOUT ? z * dp : dp) - shared.delta[row]);
    const float t = ds * relative + p * ((DROPOUT ? z * u : u) - shared.delta_dot[row]);
    const SecondScores<float> second(t, ds, slope, derivatives.by_bias, motion);
    if constexpr (DBIAS) score_tile.dbias.add(i, j, second.t_bias);
    add_to_arrays(motion, t, ds);
    const float p_dot = p * relative;
    return {DROPOUT ? z * p_dot : p_dot, second.tx * score_mod.scale,
            second.ds * score_mod.scale};
}

// P (scale W - b), scale T and scale dS replace S, W and dP; all are 0 for masked pairs.
template <bool MASKED>
__device__ __forceinline__ void compute_weights(
    Scores& s, Scores& w, Scores& dp, const Scores& u, const SharedPlan& shared,
    const ScoreTile& score_tile, const HeadTangent<float>& tangent) {
    constexpr int ROWS = ScoreGrid::WARP_ROWS / LANE_ROWS;
    constexpr int KEYS = ScoreGrid::WARP_COLUMNS / LANE_COLUMNS;
    using Pairs = LaneGrid<LaneAxis<ROWS, 1, LANE_ROWS, ROW_LANES>,
                           LaneAxis<KEYS, 1, LANE_COLUMNS, COLUMN_LANES>>;
    Pairs pairs{};
    if constexpr (DMOD)
        pairs = {score_tile.q_start + ScoreGrid::first_row() + lane_row(),
                 score_tile.k_start + ScoreGrid::first_column() + lane_column()};
    ScoreMod<float>::ArraySums<Pairs> sums;
    Kept<ROWS, KEYS> kept;
    if constexpr (DROPOUT)
        find_kept(kept, score_tile.dropout, score_tile.q_start + ScoreGrid::first_row(),
                  score_tile.k_start + ScoreGrid::first_column());
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = ScoreGrid::first_row() + lane_row() + i * LANE_ROWS;
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int key = ScoreGrid::first_column() + lane_column() + j * LANE_COLUMNS;
            const SecondWeight weight = second_weight(
                s[i][j], w[i][j], dp[i][j], u[i][j], shared, score_tile, tangent, row, key,
                !MASKED || score_tile.visible(row, key), DROPOUT && kept.at(i, j),
                [&](const PairMotion<float>& motion, float t, float ds_of_score) {
                    score_tile.score_mod.add_second_gradients(
                        sums, pairs, i, j, motion, t, ds_of_score);
                });
            s[i][j] = weight.p_dot;
            w[i][j] = weight.t;
            dp[i][j] = weight.ds;
        }
    }
    score_tile.score_mod.finish_gradients(sums, pairs);
}

// Which tiles contain a NaN or an infinity, so that the matmuls that add them up must test the
// visibility of each pair (barrier_or_nonfinite): dO; Q or ddQ; K or ddK.
struct Nonfinite { bool dout, q, k; };

// The products of a query tile, once dO and then Q have arrived, and the weights made of them.
template <bool MASKED>
__device__ __forceinline__ void compute_scores(
    SharedPlan& shared, const ScoreTile& score_tile, const HeadTangent<float>& tangent,
    Scores& p_dot, Scores& t, Scores& ds, Nonfinite& nonfinite) {
    const int row = ScoreGrid::first_row(), column = ScoreGrid::first_column();
    Scores u;
    cp_async_wait<1>();                                     // dO; the first time K, V, ddK, ddV
    nonfinite.dout = barrier_or_nonfinite<MASKED>(shared.dout);
    gemm_abt_tangents<false, V_DOT>(
        ds, one(u), shared.dout, one(shared.dout), row, shared.v, one(shared.v_dot), column);
    cp_async_wait<0>();                                     // Q and ddQ
    nonfinite.q = barrier_or_nonfinite_all<MASKED, Q_DOT>(shared.q, one(shared.q_dot));
    gemm_abt_tangents<Q_DOT, K_DOT>(
        p_dot, one(t), shared.q, one(shared.q_dot), row, shared.k, one(shared.k_dot), column);
    compute_weights<MASKED>(p_dot, t, ds, u, shared, score_tile, tangent);
}

// d2Q = T K + dS ddK of query tile q_tile, with the scale in T and dS, added to d2Q.
template <bool MASKED>
__device__ __forceinline__ void add_d2q(
    DqSemaphore<>& dq_semaphore, const SharedPlan& shared, const BackwardArguments& arrays,
    const ScoreTile& score_tile, TileCoord coord, int head, int q_tile, int num_q_tiles,
    bool nonfinite) {
    const auto visible = [&](int i, int key) {
        return score_tile.visible(QueryGrid::first_row() + lane_row() + i * LANE_ROWS, key);
    };
    const int row = QueryGrid::first_row(), column = QueryGrid::first_column();
    QueryGrid::Sums d2q;
    set_zero(d2q);
    gemm_ab<MASKED, BLOCK_K>(
        d2q, shared.weights.at + row, shared.k, 0, column, visible, nonfinite);
    if constexpr (K_DOT)
        gemm_ab<MASKED, BLOCK_K>(
            d2q, shared.ds.at + row, shared.k_dot, 0, column, visible, nonfinite);
    add_to_dq_in_order(dq_semaphore, arrays, score_tile, coord, head, q_tile, num_q_tiles, d2q);
}

// d2K += T^T Q + dS^T ddQ.
template <bool MASKED>
__device__ __forceinline__ void add_d2k(
    KeyGrid::Sums& d2k, const SharedPlan& shared, const ScoreTile& score_tile, bool nonfinite) {
    const int row = KeyGrid::first_row(), column = KeyGrid::first_column();
    const KeyVisibility visible{score_tile, row};
    gemm_atb<MASKED>(d2k, shared.weights.at, row, shared.q, column, visible, nonfinite);
    if constexpr (Q_DOT)
        gemm_atb<MASKED>(d2k, shared.ds.at, row, shared.q_dot, column, visible, nonfinite);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
double_backward_fma(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the key tile, and the query tiles that see it.
    const Shape& call_shape = arrays_of(call_args).shape;
    const int num_q_tiles = num_query_tiles(call_args, BLOCK_Q);
    const int group_size = call_shape.num_heads_q / call_shape.num_heads_kv;
    TileCoord coord =
        key_tile_of_block(call_args, num_key_tiles(call_args, BLOCK_K), shared_bytes);
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
    const QueryLoader<SharedPlan> plain{shared, args, arrays, shape, coord, end_head};
    const SecondLoader loader{plain};

    KeyGrid::Sums d2k;
    ValueGrid::Sums d2v;
    set_zero(d2k);
    set_zero(d2v);

    // Main loop, one query tile per iteration. The loads of its dO and Q have been started.
    Nonfinite nonfinite{};
    DqSemaphore<> dq_semaphore;
    const auto iterate = [&](auto masked, const HeadTangent<float>& tangent, int head,
                             int tile) {
        constexpr bool MASKED = masked.value;
        const int tile_after = order.after(tile);
        const bool last_tile = !order.has(tile_after);
        const int next_head = head + last_tile, next_tile = last_tile ? order.first : tile_after;
        score_tile.q_start = tile * BLOCK_Q;
        const int row = ScoreGrid::first_row(), column = ScoreGrid::first_column();

        Scores p_dot, t, ds;
        compute_scores<MASKED>(shared, score_tile, tangent, p_dot, t, ds, nonfinite);
        write_weights(shared.weights.at, row, column, p_dot);
        write_weights(shared.ds.at, row, column, ds);
        __syncthreads();                                    // they are written
        gemm_atb<MASKED>(
            d2v, shared.weights.at, ValueGrid::first_row(), shared.dout, ValueGrid::first_column(),
            KeyVisibility{score_tile, ValueGrid::first_row()}, nonfinite.dout);
        __syncthreads();                                    // `weights` and dO are free

        loader.load_dout(next_head, next_tile);
        write_weights(shared.weights.at, row, column, t);
        __syncthreads();                                    // T is written
        add_d2q<MASKED>(
            dq_semaphore, shared, arrays, score_tile, coord, head, tile, num_q_tiles, nonfinite.k);
        add_d2k<MASKED>(d2k, shared, score_tile, nonfinite.q);
        __syncthreads();                                    // T, dS, Q and ddQ are free
        dq_semaphore.release();
        loader.load_q(next_head, next_tile);
    };

    if (order.has(order.first)) {
        nonfinite.k = load_first_tiles(loader, score_tile.k_start, first_head, order.first);
        for (int head = first_head; head < end_head; ++head) {
            score_tile.set_head(args, coord.batch, head);
            const HeadTangent<float> tangent(args, 0, coord.batch, head);
            for (int tile = order.first; order.has(tile); tile = order.after(tile))
                if (score_tile.full(tiles, tile)) iterate(Bool<false>{}, tangent, head, tile);
                else iterate(Bool<true>{}, tangent, head, tile);
        }
    }

    // Epilogue.
    store_gradient<KeyGrid>(
        d2k, arrays.dk, arrays.dk_stride, coord, shape.seqlen_k, shape.head_dim);
    store_gradient<ValueGrid>(
        d2v, arrays.dv, arrays.dv_stride, coord, shape.seqlen_k, shape.head_dim_v);
}
