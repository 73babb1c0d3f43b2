// Backward attention by mma.sync in steps of 8: for double, where tensor cores multiply doubles
// (sm_80, sm_90, sm_100, sm_103), and for float split into tf32 parts (precision "tf32x3", sm_80
// and newer).
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = scale P (dP - delta)
//     dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691), as fma/backward.cu: a block computes BLOCK_K
// keys of one key head. It visits the query tiles that see them, of every query head of the group,
// and keeps dK and dV in registers. It adds its part of dQ to dQ in global memory, which
// prepare/delta.cu has zeroed; delta = rowsum(dO * O) - dlse comes from there too.
//
// Grid: tiles of BLOCK_K keys of all (batch, key head) pairs (scheduler.cuh), the first tiles
// first: if CAUSAL, most queries see those.
// Block: NUM_WARPS warps, SCORE_WARPS_Q of them along the queries of S, dP and dQ,
// GRADIENT_WARPS_K along the keys of dK and dV.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, GRADIENT_WARPS_K,
// BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to
// multiples of 32, of wide heads 128; SCORE_PARTS: as in mma8/forward.cu; LOADS_IN_TURN: Q and dO
// share their place, for wide heads, and Q loads twice; DETERMINISTIC: the blocks of one head add
// to a query tile's dQ in the order of their key tiles; Arguments and the options
// (docs/guide/options.md). With score modifications, scale S above stands for the score
// (score_mod.cuh), and dS for the gradient with respect to S.
// Shared memory, in elements:
//     k  BLOCK_K * (HEAD_DIM + 4)              v     BLOCK_K * (HEAD_DIM_V + 4)
//     q  BLOCK_Q * (HEAD_DIM + 4)              dout  BLOCK_Q * (HEAD_DIM_V + 4)
//     weights  BLOCK_Q * (BLOCK_K + 4)         P, then dS
//     lse, delta  BLOCK_Q each
// The next dO loads while dQ and dK are computed, the next Q while dP is: six barriers an
// iteration. If they load in turn, q and dout are one tile and
//     parts  SCORE_PARTS * BLOCK_Q * BLOCK_K
// is another: S, dO loads, dP and dV, Q loads again, dQ and dK, the next Q loads. Nine barriers.
//
// Bad at: few keys with many queries (one block per key tile); head_dim above 128, where little
// fits into shared memory; NaN or infinity in a partly masked tile.
#include "common/backward_loads.cuh"
#include "common/key_tile.cuh"
#include "common/packed_sequences.cuh"
#include "mma8/backward_gradients.cuh"
#include "mma8/backward_scores.cuh"

// Computes dP and S of a query tile where dO takes Q's place; they become dS and P. The flags, the
// same in all threads: whether dO, or Q, of a partly masked tile contains a NaN or an infinity.
// Only the SharedPlan of LOADS_IN_TURN has parts.
template <bool MASKED, class Plan, class Loader>
__device__ __forceinline__ void compute_scores_in_turn(
    Plan& shared, const Loader& loader, int head, int tile, const ScoreTile& score_tile,
    Element scale, Scores& s, Scores& ds, bool& dout_nonfinite, bool& q_nonfinite) {
    const int part = ScoreGrid::part(), group = ScoreGrid::group();
    cp_async_wait<0>();                                     // Q; at first, K and V
    if constexpr (MASKED) q_nonfinite = __syncthreads_or(loaded_nonfinite(shared.q));
    else __syncthreads();
    gemm_abt<SCORE_PARTS>(
        s, shared.q, ScoreGrid::first_row(), shared.k, ScoreGrid::first_column(), part);
    shared.store_part(part, group, s);
    __syncthreads();                                        // S's parts are written, Q is free
    loader.load_dout(head, tile);
    shared.add_parts(group, s);
    cp_async_wait<0>();
    if constexpr (MASKED) dout_nonfinite = __syncthreads_or(loaded_nonfinite(shared.dout));
    else __syncthreads();                                   // and S's parts are read
    gemm_abt<SCORE_PARTS>(
        ds, shared.dout, ScoreGrid::first_row(), shared.v, ScoreGrid::first_column(), part);
    shared.store_part(part, group, ds);
    __syncthreads();                                        // dP's parts are written
    shared.add_parts(group, ds);
    compute_p_and_ds<MASKED>(s, ds, shared, score_tile, scale);
}

// The same where each has its place, once dO and then Q have arrived.
template <bool MASKED, class Loader>
__device__ __forceinline__ void compute_scores(
    SharedPlan& shared, const Loader& loader, int head, int tile, const ScoreTile& score_tile,
    Element scale, Scores& s, Scores& ds, bool& dout_nonfinite, bool& q_nonfinite) {
    if constexpr (LOADS_IN_TURN)
        return compute_scores_in_turn<MASKED>(
            shared, loader, head, tile, score_tile, scale, s, ds, dout_nonfinite, q_nonfinite);
    cp_async_wait<1>();                                     // dO; in the first iteration, K and V
    if constexpr (MASKED) dout_nonfinite = __syncthreads_or(loaded_nonfinite(shared.dout));
    else __syncthreads();
    gemm_abt(ds, shared.dout, ScoreGrid::first_row(), shared.v, ScoreGrid::first_column());
    cp_async_wait<0>();                                     // Q
    if constexpr (MASKED) q_nonfinite = __syncthreads_or(loaded_nonfinite(shared.q));
    else __syncthreads();
    gemm_abt(s, shared.q, ScoreGrid::first_row(), shared.k, ScoreGrid::first_column());
    compute_p_and_ds<MASKED>(s, ds, shared, score_tile, scale);
}

// Q is there again, if it loads twice.
__device__ __forceinline__ void wait_for_q_again() {
    if constexpr (!LOADS_IN_TURN) return;
    cp_async_wait<0>();
    __syncthreads();
}

// dQ = dS K of query tile q_tile, added to dQ.
template <bool MASKED>
__device__ __forceinline__ void add_dq(
    DqSemaphore<>& dq_semaphore, SharedPlan& shared, const BackwardArguments& arrays,
    const ScoreTile& score_tile, TileCoord coord, int head, int q_tile, int num_q_tiles,
    bool k_nonfinite) {
    QueryGrid::Sums dq;
    set_zero<QueryGrid::M_TILES, QueryGrid::N_TILES>(dq);
    gradient_gemm<QueryGrid, false, MASKED>(dq, shared, shared.k, score_tile, k_nonfinite);
    add_to_dq_in_order(dq_semaphore, arrays, score_tile, coord, head, q_tile, num_q_tiles, dq);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_mma8(const __grid_constant__ Arguments call_args) {
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
    const Element scale = static_cast<Element>(arrays.scale);
    ScoreTile score_tile(args, coord.batch, coord.tile);
    const QueryTiles tiles = score_tile.mask.query_tiles(score_tile.k_start, BLOCK_Q, BLOCK_K);
    score_tile.set_group(coord.head * group_size);
    const QueryOrder order(score_tile.pair_mask, tiles, coord.tile);
    const int first_head = coord.head * group_size, end_head = first_head + group_size;
    const QueryLoader<SharedPlan> loader{shared, args, arrays, shape, coord, end_head};

    KeyGrid::Sums dk;
    ValueGrid::Sums dv;
    set_zero<KeyGrid::M_TILES, KeyGrid::N_TILES>(dk);
    set_zero<ValueGrid::M_TILES, ValueGrid::N_TILES>(dv);

    // Main loop, one query tile per iteration. The loads of its dO and Q have been started.
    bool k_nonfinite = false;
    DqSemaphore<> dq_semaphore;
    const auto iterate = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const int tile_after = order.after(tile);
        const bool last_tile = !order.has(tile_after);
        const int next_head = head + last_tile, next_tile = last_tile ? order.first : tile_after;
        score_tile.q_start = tile * BLOCK_Q;

        bool dout_nonfinite = false, q_nonfinite = false;
        Scores s, ds;                                       // S, then P; dP, then dS
        compute_scores<MASKED>(shared, loader, head, tile, score_tile, scale, s, ds,
                               dout_nonfinite, q_nonfinite);

        write_weights(shared, s);
        __syncthreads();                                    // P is written
        gradient_gemm<ValueGrid, true, MASKED>(
            dv, shared, shared.dout, score_tile, dout_nonfinite);
        __syncthreads();                                    // P and dO are free

        if constexpr (LOADS_IN_TURN) loader.load_q(head, tile);
        else loader.load_dout(next_head, next_tile);
        write_weights(shared, ds);
        __syncthreads();                                    // dS is written
        add_dq<MASKED>(
            dq_semaphore, shared, arrays, score_tile, coord, head, tile, num_q_tiles, k_nonfinite);
        wait_for_q_again();
        gradient_gemm<KeyGrid, true, MASKED>(dk, shared, shared.q, score_tile, q_nonfinite);
        __syncthreads();                                    // dS and Q are free
        dq_semaphore.release();
        loader.load_q(next_head, next_tile);
    };

    if (order.has(order.first)) {
        load_keys(shared, arrays, coord, score_tile.k_start, shape.seqlen_k - score_tile.k_start);
        if constexpr (!LOADS_IN_TURN) loader.load_dout(first_head, order.first);
        loader.load_q(first_head, order.first);
        cp_async_wait<LOADS_IN_TURN ? 0 : 1>();
        k_nonfinite = __syncthreads_or(loaded_nonfinite(shared.k));
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
