// The gradient of backward attention for 16-bit types by mma.sync, sm_80 and newer: d2K, d2V and
// the float sums of d2Q. Of each pair it computes T_X, g dS and P (W - b): simt/double_backward.cuh
// has the equations.
//
//     d2Q = scale ((g dS) ddK + T_X K),  d2K = scale ((g dS)^T ddQ + T_X^T Q)
//     d2V = (P (W - b))^T dO
//
// One pass, as in sm80/backward.cu: a block computes BLOCK_K keys of one key head, visits the query
// tiles that see them, of every query head of the group, and keeps d2K and d2V in registers. It
// adds its part of d2Q to float sums in global memory, which finish/dq.cu scales and rounds. D and
// F come from prepare/double_delta.cu, b and ddO from a JVP.
//
// Grid, block: those of sm80/backward.cu.
// Constants: those of sm80/backward.cu; Q_DOT to MOD_DOT: which gradients
// the loss depends on.
// Shared memory, in bytes, columns rounded up to multiples of 64 (smem.cuh):
//     k, k_dot       BLOCK_K * HEAD_DIM * 2 each              d2K in the epilogue
//     v, v_dot       BLOCK_K * HEAD_DIM_V * 2 each            d2V in the epilogue
//     q, q_dot       NUM_STAGES * BLOCK_Q * HEAD_DIM * 2 each
//     dout           NUM_STAGES * BLOCK_Q * HEAD_DIM_V * 2
//     tx, ds, p_dot  BLOCK_Q * BLOCK_K * 2 each               exchanged between warps
//     rows           NUM_STAGES * BLOCK_Q * 16                lse, D, b, F
// Barriers as in sm80/backward.cu.
//
// Bad at: what sm80/backward.cu is bad at; seven tiles of rows leave room for one block on an SM
// where head_dim is above 64.
#include "common/key_tile.cuh"
#include "sm80/double_backward_gradients.cuh"
#include "sm80/row_loads.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;                   // then d2K
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot;                 // then d2V
    SmemTile<BLOCK_Q, HEAD_DIM> q[NUM_STAGES], q_dot[NUM_STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[NUM_STAGES];
    SmemTile<BLOCK_Q, BLOCK_K> tx, ds, p_dot;
    alignas(1024) RowStatistics rows[NUM_STAGES];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "the main loop knows one or two stages");
static_assert(!LOADS_IN_TURN || NUM_STAGES == 1, "the other stage loads a whole iteration ahead");

// Start the loads of a query tile: of Q and ddQ, of dO, of the statistics of rows.
__device__ __forceinline__ void load_q(
    SharedPlan& shared, const Arguments& args, int batch, QueryWalk::Place at, int stage) {
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int start = at.tile * BLOCK_Q, end = shape.seqlen_q;
    Rows<BLOCK_Q>(arrays.q, arrays.q_stride, batch, at.head)
        .load<HEAD_DIM, true>(shared_address(&shared.q[stage]), start, end, shape.head_dim);
    if constexpr (Q_DOT)
        Rows<BLOCK_Q>(args.q_dot, args.tangents.q_dot, 0, batch, at.head)
            .load<HEAD_DIM, true>(
                shared_address(&shared.q_dot[stage]), start, end, shape.head_dim);
}
__device__ __forceinline__ void load_dout(
    SharedPlan& shared, const Arguments& args, int batch, QueryWalk::Place at, int stage) {
    const BackwardArguments& arrays = arrays_of(args);
    Rows<BLOCK_Q>(arrays.dout, arrays.dout_stride, batch, at.head)
        .load<HEAD_DIM_V, true>(
            shared_address(&shared.dout[stage]), at.tile * BLOCK_Q, arrays.shape.seqlen_q,
            arrays.shape.head_dim_v);
}
__device__ __forceinline__ void load_statistics(
    SharedPlan& shared, const Arguments& args, int batch, QueryWalk::Place at, int stage) {
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int start = at.tile * BLOCK_Q, end = shape.seqlen_q;
    const i64 first = (static_cast<i64>(batch) * shape.num_heads_q + at.head) * rows_of_head(args)
                    + start;
    const RowStatistics& rows = shared.rows[stage];
    const auto load = [&](const float* target, const void* source, int i) {
        cp_async_4(shared_address(target + i), static_cast<const float*>(source) + first + i,
                   start + i < end ? 4 : 0);
    };
    for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
        load(rows.lse, arrays.lse, i);
        load(rows.delta, arrays.delta, i);
        load(rows.b, args.lse_dot, i);
        load(rows.product, args.delta_dot, i);
    }
}
// All of these, one cp.async group.
__device__ __forceinline__ void load_queries(
    SharedPlan& shared, const Arguments& args, int batch, QueryWalk::Place at, int stage) {
    load_q(shared, args, batch, at, stage);
    load_dout(shared, args, batch, at, stage);
    load_statistics(shared, args, batch, at, stage);
    cp_async_commit();
}

// Starts the loads of the block's K, V, ddK and ddV.
__device__ __forceinline__ void load_keys(
    SharedPlan& shared, const Arguments& args, TileCoord coord) {
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int start = coord.tile * BLOCK_K, end = shape.seqlen_k;
    Rows<BLOCK_K>(arrays.k, arrays.k_stride, coord.batch, coord.head)
        .load<HEAD_DIM, true>(shared_address(&shared.k), start, end, shape.head_dim);
    Rows<BLOCK_K>(arrays.v, arrays.v_stride, coord.batch, coord.head)
        .load<HEAD_DIM_V, true>(shared_address(&shared.v), start, end, shape.head_dim_v);
    if constexpr (K_DOT)
        Rows<BLOCK_K>(args.k_dot, args.tangents.k_dot, 0, coord.batch, coord.head)
            .load<HEAD_DIM, true>(
                shared_address(&shared.k_dot), start, end, shape.head_dim);
    if constexpr (V_DOT)
        Rows<BLOCK_K>(args.v_dot, args.tangents.v_dot, 0, coord.batch, coord.head)
            .load<HEAD_DIM_V, true>(
                shared_address(&shared.v_dot), start, end, shape.head_dim_v);
}

// Whether the chunks that the thread itself loaded have a NaN or an infinity: of K and ddK, and of
// Q, ddQ and dO, which are operands of gradients.
__device__ __forceinline__ bool keys_nonfinite(SharedPlan& shared) {
    const auto in = [](u32 tile) {
        return loaded_nonfinite<Element, BLOCK_K, HEAD_DIM, THREADS>(tile);
    };
    return in(shared_address(&shared.k)) || (K_DOT && in(shared_address(&shared.k_dot)));
}
__device__ __forceinline__ bool queries_nonfinite(SharedPlan& shared, int stage) {
    const auto in = [](u32 tile) {
        return loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM, THREADS>(tile);
    };
    return in(shared_address(&shared.q[stage]))
        || (Q_DOT && in(shared_address(&shared.q_dot[stage])))
        || loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM_V, THREADS>(
               shared_address(&shared.dout[stage]));
}

// T_X, g dS and, for d2V, Z P (W - b) of a tile, to shared memory.
template <bool MASKED>
__device__ __forceinline__ void compute_weights(
    SharedPlan& shared, const ScoreTile& score_tile, const HeadTangent<float>& tangent,
    int stage) {
    if (SCORE_WARPS < NUM_WARPS && threadIdx.x / 32 >= SCORE_WARPS) return;
    const RowStatistics& rows = shared.rows[stage];
    const u32 dout = shared_address(&shared.dout[stage]);
    Scores s, w, dp, u;                                     // s: then P; w: then W - b
    PairMotions motions;
    pair_gemms<HEAD_DIM, Q_DOT, K_DOT>(
        s, w, shared_address(&shared.q[stage]), shared_address(&shared.q_dot[stage]),
        shared_address(&shared.k), shared_address(&shared.k_dot));
    probabilities_and_tangents(s, w, motions, rows, score_tile, tangent);
    pair_gemms<HEAD_DIM_V, false, V_DOT>(
        dp, u, dout, dout, shared_address(&shared.v), shared_address(&shared.v_dot));
    KeptBits kept;
    if constexpr (DROPOUT) {
        find_kept(kept, score_tile);
        apply_dropout(dp, kept, score_tile);
        apply_dropout(u, kept, score_tile);
    }
    second_weights(s, w, dp, u, rows, score_tile);          // w, dp, u: P (W - b), dS, T
    if constexpr (DROPOUT) apply_dropout(w, kept, score_tile);
    store_weights<MASKED>(shared_address(&shared.p_dot), w, score_tile);
    if constexpr (MASKED && SUMS_SCORES) {
        apply_mask(u, score_tile);
        apply_mask(dp, score_tile);
    }
    if constexpr (BENDS || SUMS_SCORES) second_scores(u, dp, motions, score_tile);
    store_weights<MASKED>(shared_address(&shared.tx), u, score_tile);
    store_weights<MASKED>(shared_address(&shared.ds), dp, score_tile);
}

// d2K / scale += T_X^T Q + (g dS)^T ddQ.
template <bool MASKED>
__device__ __forceinline__ void add_d2k(
    KeyGrid::Fragments& d2k, const SharedPlan& shared, int stage, const ScoreTile& score_tile,
    bool nonfinite) {
    const int row = KeyGrid::first_row(), column = KeyGrid::first_column();
    add_product<false, BLOCK_Q, MASKED>(
        d2k, shared.tx, shared.q[stage], row, column, score_tile, nonfinite);
    if constexpr (Q_DOT)
        add_product<false, BLOCK_Q, MASKED>(
            d2k, shared.ds, shared.q_dot[stage], row, column, score_tile, nonfinite);
}

// The same between two barriers, of which the first frees dO, the second Q: `next` loads to their
// places, if there is one.
template <bool MASKED>
__device__ __forceinline__ void add_d2k_and_load(
    KeyGrid::Fragments& d2k, SharedPlan& shared, const Arguments& args, int batch,
    const ScoreTile& score_tile, bool nonfinite, QueryWalk::Place next, bool has_next) {
    __syncthreads();
    if (has_next) {
        load_dout(shared, args, batch, next, 0);
        load_statistics(shared, args, batch, next, 0);
    }
    add_d2k<MASKED>(d2k, shared, 0, score_tile, nonfinite);
    __syncthreads();
    if (has_next) load_q(shared, args, batch, next, 0);
    cp_async_commit();
}

// d2K and d2V leave through the tiles of K and V, once no warp reads those any more.
__device__ __forceinline__ void store_gradients(
    SharedPlan& shared, const BackwardArguments& arrays, TileCoord coord, KeyGrid::Fragments& d2k,
    ValueGrid::Fragments& d2v) {
    const int num_rows = arrays.shape.seqlen_k - coord.tile * BLOCK_K;
    __syncthreads();
    store_gradient<KeyGrid, HEAD_DIM>(
        d2k, static_cast<float>(arrays.scale), shared_address(&shared.k), arrays.dk,
        arrays.dk_stride, coord, num_rows, arrays.shape.head_dim);
    store_gradient<ValueGrid, HEAD_DIM_V>(
        d2v, 1.0f, shared_address(&shared.v), arrays.dv, arrays.dv_stride, coord, num_rows,
        arrays.shape.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
double_backward_sm80(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the key tile, and the query tiles that see it.
    TileCoord coord =
        key_tile_of_block(call_args, num_key_tiles(call_args, BLOCK_K), shared_bytes);
    const int num_q_tiles = num_query_tiles(call_args, BLOCK_Q);
    const auto sequence = sequence_of_block<true>(call_args, coord.tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q, BLOCK_Q * HEAD_DIM);
    const BackwardArguments& arrays = arrays_of(args);
    const int group_size = arrays.shape.num_heads_q / arrays.shape.num_heads_kv;
    ScoreTile score_tile(args, coord.batch, coord.tile);
    const QueryTiles tiles = score_tile.mask.query_tiles(coord.tile * BLOCK_K, BLOCK_Q, BLOCK_K);
    const int first_head = coord.head * group_size, end_head = first_head + group_size;
    const QueryWalk walk{{score_tile.pair_mask, tiles, coord.tile}, first_head, end_head};
    QueryWalk::Place at = walk.first();

    KeyGrid::Fragments d2k;
    ValueGrid::Fragments d2v;
    set_zero(d2k);
    set_zero(d2v);

    load_keys(shared, args, coord);
    cp_async_commit();
    if (walk.has(at)) load_queries(shared, args, coord.batch, at, 0);
    cp_async_wait<0>();
    const bool k_nonfinite = __syncthreads_or(keys_nonfinite(shared));

    // Main loop, one query tile per iteration. Its rows are on their way to `stage`; the other
    // stage is free once all warps are past the first barrier.
    int stage = 0;
    DqSemaphore<> dq_semaphore;
    const auto iterate = [&](auto masked, QueryWalk::Place next) {
        constexpr bool MASKED = masked.value;
        const HeadTangent<float> tangent(args, 0, coord.batch, at.head);
        bool nonfinite = false;                             // in Q, ddQ, dO; in all threads
        cp_async_wait<0>();
        if constexpr (MASKED) nonfinite = __syncthreads_or(queries_nonfinite(shared, stage));
        else __syncthreads();
        dq_semaphore.release();
        if (NUM_STAGES == 2 && walk.has(next))
            load_queries(shared, args, coord.batch, next, stage ^ 1);

        compute_weights<MASKED>(shared, score_tile, tangent, stage);
        __syncthreads();

        add_product<false, BLOCK_Q, MASKED>(
            d2v, shared.p_dot, shared.dout[stage], ValueGrid::first_row(),
            ValueGrid::first_column(), score_tile, nonfinite);
        if constexpr (LOADS_IN_TURN)
            add_d2k_and_load<MASKED>(d2k, shared, args, coord.batch, score_tile, nonfinite, next,
                                     walk.has(next));
        add_d2q<MASKED>(dq_semaphore, shared, arrays, score_tile, coord, at.head, at.tile,
                        num_q_tiles, k_nonfinite);
        if constexpr (!LOADS_IN_TURN) add_d2k<MASKED>(d2k, shared, stage, score_tile, nonfinite);

        if (NUM_STAGES == 2) stage ^= 1;
        if (NUM_STAGES == 1 && !LOADS_IN_TURN) {
            __syncthreads();
            if (walk.has(next)) load_queries(shared, args, coord.batch, next, 0);
        }
    };

    while (walk.has(at)) {
        const QueryWalk::Place next = walk.after(at);
        score_tile.set_head(args, coord.batch, at.head);
        score_tile.q_start = at.tile * BLOCK_Q;
        if (score_tile.full(tiles, at.tile)) iterate(Bool<false>{}, next);
        else iterate(Bool<true>{}, next);
        at = next;
    }

    dq_semaphore.finish();
    store_gradients(shared, arrays, coord, d2k, d2v);
}
