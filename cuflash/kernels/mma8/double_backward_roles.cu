// The double backward pass of mma8/double_backward.cu, with its equations, for double where tiles
// are too small for two warps a scheduler to share each matmul. Half of the warps compute the
// weights of a query tile, five matmuls, while the other half compute the gradients of the tile
// before, five more. Each scheduler has a warp of either role: one's MMAs run during the other's
// loads, exponentials and additions to d2Q.
//
//     score warps      dP, U; S, W; T_X, g dS and Z P (W - b), to shared memory
//     gradient warps   d2V += (Z P (W - b))^T dO;  d2K += T_X^T Q + (g dS)^T ddQ;
//                      d2Q of the tile, added to d2Q in global memory;  loads of query tiles
//
// A score warp holds its keys of V and ddV in registers, as fragments of dP's and U's B: shared
// memory has room for two query tiles instead.
//
// Grid: that of mma8/backward.cu. Block: NUM_WARPS / 2 score warps, then as many gradient warps.
// SCORE_WARPS_Q of either along the queries of the scores and of d2Q, GRADIENT_WARPS_K gradient
// warps along the keys of d2K and d2V.
// Constants: those of mma8/double_backward.cu; WARP_ROLES = 2.
// Shared memory, in elements, the middle two lines twice (two stages of query tiles):
//     k, k_dot  BLOCK_K * (HEAD_DIM + 4) each
//     q, q_dot  BLOCK_Q * (HEAD_DIM + 4) each      dout  BLOCK_Q * (HEAD_DIM_V + 4)
//     lse, delta, b, delta_dot  BLOCK_Q each       p_dot, tx, ds  BLOCK_Q * (BLOCK_K + 4) each
//     nonfinite  an int of each gradient warp
//
// Named barriers, all threads at each: one role arrives, the other waits.
//     DOUT_FULL, of a stage: dO has arrived, and the stage's weights are free again
//     Q_FULL: Q and ddQ have arrived
//     WEIGHTS_FULL, of a stage: the weights are written, and dO's row numbers are free
// A role arrives at one again only after it has waited for what the other publishes past it, so no
// arrival counts for a later phase. The gradient warps load dO of the tile after the next one when
// d2V is computed, Q and ddQ when d2K is.
//
// Bad at: what mma8/backward.cu is bad at; few query tiles per key tile, which the first weights
// and the last gradients delay.
#include "common/key_tile.cuh"
#include "mma8/double_backward_gradients.cuh"
#include "mma8/double_backward_loads.cuh"
#include "mma8/tangent_matmuls.cuh"

static_assert(WARP_ROLES == 2 && !IN_PARTS, "V's fragments are not split into parts");

constexpr int GRADIENT_BARRIER = 1, Q_FULL = 2, DOUT_FULL = 3, WEIGHTS_FULL = 5;
using GradientWarps = WarpRange<ROLE_WARPS, ROLE_WARPS, GRADIENT_BARRIER>;

// A query tile and its weights.
struct QueryStage {
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    SharedWeights p_dot, tx, ds;                            // Z P (W - b), T_X, g dS
    Element lse[BLOCK_Q], delta[BLOCK_Q], b[BLOCK_Q], delta_dot[BLOCK_Q];
};

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;
    QueryStage stages[2];
    int nonfinite[ROLE_WARPS];                              // of each gradient warp
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// ---- Score warps ----

// A warp's keys of V or ddV: of tile n and eight columns from 8 k on, the lane's operands B.
using ValueFragments = Element[ScoreGrid::N_TILES][HEAD_DIM_V / 8][2];

// From num_keys rows, `step` elements apart, of num_columns columns; the others are 0.
__device__ __forceinline__ void load_values(
    ValueFragments& values, const Element* rows, i64 step, int num_keys, int num_columns) {
    #pragma unroll
    for (int n = 0; n < ScoreGrid::N_TILES; ++n) {
        const int key = ScoreGrid::first_column() + n * 8 + threadIdx.x % 32 / 4;
        #pragma unroll
        for (int k = 0; k < HEAD_DIM_V / 8; ++k)
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = k * 8 + threadIdx.x % 4 + i * 4;
                const bool exists = key < num_keys && column < num_columns;
                values[n][k][i] = exists ? rows[key * step + column] : 0;
            }
    }
}

// dP = dO V^T, U = dO ddV^T
__device__ __forceinline__ void gemm_values(
    Scores& dp, Scores& u, const SmemTile<BLOCK_Q, HEAD_DIM_V>& dout, const ValueFragments& v,
    const ValueFragments& v_dot) {
    constexpr int M = ScoreGrid::M_TILES, N = ScoreGrid::N_TILES;
    set_zero<M, N>(dp);
    set_zero<M, N>(u);
    const Element* rows =
        &dout.at[ScoreGrid::first_row() + threadIdx.x % 32 / 4][threadIdx.x % 4];
    constexpr int PITCH = HEAD_DIM_V + ROWS_PAD;
    #pragma unroll
    for (int k = 0; k < HEAD_DIM_V / 8; ++k) {
        Operand x[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) load_rows(x[m], rows + m * 16 * PITCH + k * 8, PITCH, 4);
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply(dp[m][n], x[m], v[n][k][0], v[n][k][1]);
                if constexpr (V_DOT) multiply(u[m][n], x[m], v_dot[n][k][0], v_dot[n][k][1]);
            }
    }
}

// The weights of the query tiles, one after another.
__device__ __forceinline__ void compute_all_weights(
    SharedPlan& shared, const Arguments& args, TileCoord coord, const QueryWalk& walk,
    ScoreTile& score_tile) {
    const BackwardArguments& arrays = arrays_of(args);
    const int num_keys = arrays.shape.seqlen_k - score_tile.k_start;
    ValueFragments v, v_dot;
    const auto load = [&](ValueFragments& values, const Element* rows, i64 step) {
        load_values(values, rows + score_tile.k_start * step, step, num_keys,
                    arrays.shape.head_dim_v);
    };
    load(v, head_start(arrays.v, arrays.v_stride, coord.batch, coord.head), arrays.v_stride.token);
    if constexpr (V_DOT)
        load(v_dot, head_start(args.v_dot, args.tangents.v_dot, 0, coord.batch, coord.head),
             args.tangents.v_dot.token);

    int stage_index = 0;
    const auto compute = [&](auto masked, int head) {
        constexpr bool MASKED = masked.value;
        QueryStage& stage = shared.stages[stage_index];
        Weights x;
        barrier_sync(DOUT_FULL + stage_index, THREADS);
        gemm_values(x.ds, x.u, stage.dout, v, v_dot);
        barrier_sync(Q_FULL, THREADS);
        gemm_abt_dot<Q_DOT, K_DOT, 2>(
            x.p_dot, x.tx, stage.q, stage.q_dot, ScoreGrid::first_row(), shared.k, shared.k_dot,
            ScoreGrid::first_column());
        compute_weights<MASKED>(
            x, stage, score_tile, HeadTangent<Element>(args, 0, coord.batch, head));
        write_weights(stage.p_dot, x.p_dot);
        write_weights(stage.tx, x.tx);
        write_weights(stage.ds, x.ds);
        barrier_arrive(WEIGHTS_FULL + stage_index, THREADS);
        stage_index ^= 1;
    };
    for (auto visit = walk.first(); walk.has(visit); visit = walk.after(visit)) {
        if (visit.tile == walk.order.first) score_tile.set_head(args, coord.batch, visit.head);
        score_tile.q_start = visit.tile * BLOCK_Q;
        if (score_tile.full(walk.order.tiles, visit.tile)) compute(Bool<false>{}, visit.head);
        else compute(Bool<true>{}, visit.head);
    }
}

// ---- Gradient warps ----

// Whether any gradient warp has found a NaN or an infinity: bit i, of what found[i] tells.
__device__ __forceinline__ int found_anywhere(SharedPlan& shared, const bool (&found)[3]) {
    int bits = 0;
    #pragma unroll
    for (int i = 0; i < 3; ++i) bits |= (__ballot_sync(WHOLE_WARP, found[i]) != 0) << i;
    return or_over_warps(
        shared.nonfinite, GradientWarps::rank() / 32, bits, GradientWarps::sync);
}

__device__ __forceinline__ void find_nonfinite_keys(Nonfinite& nonfinite, SharedPlan& shared) {
    bool found[3] = {loaded_nonfinite<GradientWarps>(shared.k)};
    if constexpr (K_DOT) found[1] = loaded_nonfinite<GradientWarps>(shared.k_dot);
    const int bits = found_anywhere(shared, found);
    nonfinite.k = bits & 1;
    nonfinite.k_dot = bits & 2;
}

__device__ __forceinline__ void find_nonfinite_queries(
    Nonfinite& nonfinite, SharedPlan& shared, const QueryStage& stage) {
    bool found[3] = {loaded_nonfinite<GradientWarps>(stage.dout),
                     loaded_nonfinite<GradientWarps>(stage.q)};
    if constexpr (Q_DOT) found[2] = loaded_nonfinite<GradientWarps>(stage.q_dot);
    const int bits = found_anywhere(shared, found);
    nonfinite.dout = bits & 1;
    nonfinite.q = bits & 2;
    nonfinite.q_dot = bits & 4;
}

// d2K and d2V of the block's keys, and their part of d2Q.
__device__ __forceinline__ void compute_gradients(
    KeyGrid::Sums& d2k, ValueGrid::Sums& d2v, SharedPlan& shared, const Arguments& args,
    TileCoord coord, const QueryWalk& walk, ScoreTile& score_tile, int num_q_tiles) {
    const BackwardArguments& arrays = arrays_of(args);
    const Loader<GradientWarps> loader{args, arrays, coord, walk.end_head};
    QueryWalk::Place visit = walk.first();
    if (!walk.has(visit)) return;
    QueryWalk::Place next = walk.after(visit);               // of which dO, or all, is in flight

    loader.load_k(shared.k, score_tile.k_start);
    loader.load_k_dot(shared.k_dot, score_tile.k_start);
    loader.load_dout(shared.stages[0], visit.head, visit.tile);
    loader.load_q(shared.stages[0], visit.head, visit.tile);
    loader.load_dout(shared.stages[1], next.head, next.tile);
    loader.load_q(shared.stages[1], next.head, next.tile);
    cp_async_wait<3>();
    barrier_arrive(DOUT_FULL, THREADS);                     // and K
    cp_async_wait<2>();
    barrier_arrive(Q_FULL, THREADS);
    cp_async_wait<1>();
    if (walk.has(next)) barrier_arrive(DOUT_FULL + 1, THREADS);
    Nonfinite nonfinite;
    find_nonfinite_keys(nonfinite, shared);

    int stage_index = 0;
    DqSemaphore<GradientWarps> dq_semaphore;
    const auto add = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        QueryStage& stage = shared.stages[stage_index];
        const QueryWalk::Place second = walk.has(next) ? walk.after(next) : next;
        barrier_sync(WEIGHTS_FULL + stage_index, THREADS);
        if constexpr (MASKED) find_nonfinite_queries(nonfinite, shared, stage);
        gradient_gemm<ValueGrid, true, MASKED>(
            d2v, stage.p_dot, stage.dout, score_tile, nonfinite.dout);
        cp_async_wait<0>();
        if (walk.has(next)) barrier_arrive(Q_FULL, THREADS);
        GradientWarps::sync();                              // dO is free
        dq_semaphore.release();
        loader.load_dout(stage, second.head, second.tile);
        add_to_d2k<MASKED>(d2k, stage.tx, stage.ds, stage, score_tile, nonfinite);
        GradientWarps::sync();                              // Q and ddQ are free
        loader.load_q(stage, second.head, second.tile);
        QueryGrid::Sums d2q;
        compute_d2q<MASKED>(d2q, stage.tx, stage.ds, shared, score_tile, nonfinite);
        cp_async_wait<1>();
        if (walk.has(second)) barrier_arrive(DOUT_FULL + stage_index, THREADS);
        add_to_dq_in_order(
            dq_semaphore, arrays, score_tile, coord, visit.head, visit.tile, num_q_tiles, d2q);
        stage_index ^= 1;
        visit = next;
        next = second;
    };
    while (walk.has(visit)) {
        if (visit.tile == walk.order.first)
            score_tile.set_head(args, coord.batch, visit.head);
        score_tile.q_start = visit.tile * BLOCK_Q;
        if (score_tile.full(walk.order.tiles, visit.tile)) add(Bool<false>{});
        else add(Bool<true>{});
    }
    dq_semaphore.finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
double_backward_roles(const __grid_constant__ Arguments call_args) {
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
    ScoreTile score_tile(args, coord.batch, coord.tile);
    const QueryTiles tiles = score_tile.mask.query_tiles(score_tile.k_start, BLOCK_Q, BLOCK_K);
    const int first_head = coord.head * group_size;
    const QueryWalk walk{QueryOrder(score_tile.pair_mask, tiles, coord.tile), first_head,
                         first_head + group_size};

    if (threadIdx.x / 32 < ROLE_WARPS) {
        compute_all_weights(shared, args, coord, walk, score_tile);
        return;
    }
    KeyGrid::Sums d2k;
    ValueGrid::Sums d2v;
    set_zero<KeyGrid::M_TILES, KeyGrid::N_TILES>(d2k);
    set_zero<ValueGrid::M_TILES, ValueGrid::N_TILES>(d2v);
    compute_gradients(d2k, d2v, shared, args, coord, walk, score_tile, num_q_tiles);

    // Epilogue.
    const int num_keys = arrays.shape.seqlen_k;
    store_gradient<KeyGrid>(
        d2k, arrays.dk, arrays.dk_stride, coord, num_keys, arrays.shape.head_dim);
    store_gradient<ValueGrid>(
        d2v, arrays.dv, arrays.dv_stride, coord, num_keys, arrays.shape.head_dim_v);
}
