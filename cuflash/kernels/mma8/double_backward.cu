// The gradient of backward attention by mma.sync in steps of 8: for double, where tensor cores
// multiply doubles (sm_80, sm_90, sm_100, sm_103), and for float split into tf32 parts (precision
// "tf32x3", sm_80 and newer). The cotangents of dq, dk and dv are a direction, in which scores move
// with W, lse with b and O with ddO (mma8/jvp.cu). With P, dP, dS and D of mma8/backward.cu and
//
//     U = dO ddV^T,  F = rowsum(dO * ddO)
//     T = P ((dP - D) (W - b) + U - F)             the gradient by scores, dbias's too
//     T_X = g T + g' dS X'                         by scale S: g, g' of a softcap; 1, 0 without
//
// (docs/guide/derivatives.md), the second gradients are
//
//     d2Q = scale (T_X K + (g dS) ddK),  d2K = scale (T_X^T Q + (g dS)^T ddQ)
//     d2V = (P (W - b))^T dO
//
// Dropout's Z multiplies dP, U and, for d2V, P. As in mma8/backward.cu a block computes BLOCK_K
// keys of one key head, visits the query tiles of the group's heads, keeps d2K and d2V in registers
// and adds its part of d2Q to d2Q in global memory. D and F come from prepare/double_delta.cu,
// which has zeroed d2Q too; b and ddO from a JVP.
//
// Grid, block: those of mma8/backward.cu.
// Constants: those of mma8/backward.cu; Q_DOT to MOD_DOT: which gradients
// the loss depends on.
// Shared memory, in elements:
//     k, k_dot  BLOCK_K * (HEAD_DIM + 4) each      v, v_dot  BLOCK_K * (HEAD_DIM_V + 4) each
//     q, q_dot  BLOCK_Q * (HEAD_DIM + 4) each      dout      BLOCK_Q * (HEAD_DIM_V + 4)
//     tx, others  BLOCK_Q * (BLOCK_K + 4) each     lse, delta, b, delta_dot  BLOCK_Q each
// The next dO loads while the last two matmuls run, the next Q while dP and U are computed.
//
// Bound by the matmuls, 10 against backward's 5. Bad at: what mma8/backward.cu is bad at, more so:
// tiles are half as large.
#include "common/key_tile.cuh"
#include "mma8/double_backward_gradients.cuh"
#include "mma8/double_backward_loads.cuh"
#include "mma8/tangent_matmuls.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot;
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    SharedWeights tx;                                       // T_X
    SharedWeights others;                                   // Z P (W - b), then g dS
    Element lse[BLOCK_Q], delta[BLOCK_Q], b[BLOCK_Q], delta_dot[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// The products and weights of a query tile, once dO and then Q have arrived.
template <bool MASKED>
__device__ __forceinline__ void compute_scores(
    Weights& x, SharedPlan& shared, const ScoreTile& score_tile,
    const HeadTangent<Element>& tangent, Nonfinite& nonfinite) {
    const int row = ScoreGrid::first_row(), column = ScoreGrid::first_column();
    cp_async_wait<1>();                                     // dO; in the first iteration, K and V
    if constexpr (MASKED) nonfinite.dout = __syncthreads_or(loaded_nonfinite(shared.dout));
    else __syncthreads();
    gemm_abt_dot<false, V_DOT>(
        x.ds, x.u, shared.dout, shared.dout, row, shared.v, shared.v_dot, column);
    cp_async_wait<0>();                                     // Q and ddQ
    if constexpr (MASKED) {
        nonfinite.q = __syncthreads_or(loaded_nonfinite(shared.q));
        if constexpr (Q_DOT) nonfinite.q_dot = __syncthreads_or(loaded_nonfinite(shared.q_dot));
    } else {
        __syncthreads();
    }
    gemm_abt_dot<Q_DOT, K_DOT>(
        x.p_dot, x.tx, shared.q, shared.q_dot, row, shared.k, shared.k_dot, column);
    compute_weights<MASKED>(x, shared, score_tile, tangent);
}

// T_X K + (g dS) ddK of query tile q_tile, added to d2Q.
template <bool MASKED>
__device__ __forceinline__ void add_d2q(
    DqSemaphore<>& dq_semaphore, const SharedPlan& shared, const BackwardArguments& arrays,
    const ScoreTile& score_tile, TileCoord coord, int head, int q_tile, int num_q_tiles,
    const Nonfinite& nonfinite) {
    QueryGrid::Sums d2q;
    compute_d2q<MASKED>(d2q, shared.tx, shared.others, shared, score_tile, nonfinite);
    add_to_dq_in_order(dq_semaphore, arrays, score_tile, coord, head, q_tile, num_q_tiles, d2q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
double_backward_mma8(const __grid_constant__ Arguments call_args) {
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
    score_tile.set_group(coord.head * group_size);
    const QueryOrder order(score_tile.pair_mask, tiles, coord.tile);
    const int first_head = coord.head * group_size, end_head = first_head + group_size;
    const Loader<> loader{args, arrays, coord, end_head};

    KeyGrid::Sums d2k;
    ValueGrid::Sums d2v;
    set_zero<KeyGrid::M_TILES, KeyGrid::N_TILES>(d2k);
    set_zero<ValueGrid::M_TILES, ValueGrid::N_TILES>(d2v);

    // Main loop, one query tile per iteration. The loads of its dO and Q have been started.
    Nonfinite nonfinite;
    DqSemaphore<> dq_semaphore;
    const auto iterate = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const int tile_after = order.after(tile);
        const bool last_tile = !order.has(tile_after);
        const int next_head = head + last_tile, next_tile = last_tile ? order.first : tile_after;
        score_tile.q_start = tile * BLOCK_Q;

        Weights x;
        const HeadTangent<Element> tangent(args, 0, coord.batch, head);
        compute_scores<MASKED>(x, shared, score_tile, tangent, nonfinite);
        write_weights(shared.others, x.p_dot);
        write_weights(shared.tx, x.tx);
        __syncthreads();                                    // P (W - b) and T_X are written
        gradient_gemm<ValueGrid, true, MASKED>(
            d2v, shared.others, shared.dout, score_tile, nonfinite.dout);
        __syncthreads();                                    // P (W - b) and dO are free

        loader.load_dout(shared, next_head, next_tile);
        write_weights(shared.others, x.ds);
        __syncthreads();                                    // dS is written
        add_d2q<MASKED>(
            dq_semaphore, shared, arrays, score_tile, coord, head, tile, num_q_tiles, nonfinite);
        add_to_d2k<MASKED>(d2k, shared.tx, shared.others, shared, score_tile, nonfinite);
        __syncthreads();                                    // the weights and Q, ddQ are free
        dq_semaphore.release();
        loader.load_q(shared, next_head, next_tile);
    };

    if (order.has(order.first)) {
        loader.load_all_keys(shared, score_tile.k_start);
        loader.load_dout(shared, first_head, order.first);
        loader.load_q(shared, first_head, order.first);
        cp_async_wait<1>();
        nonfinite.k = __syncthreads_or(loaded_nonfinite(shared.k));
        if constexpr (K_DOT) nonfinite.k_dot = __syncthreads_or(loaded_nonfinite(shared.k_dot));
        for (int head = first_head; head < end_head; ++head) {
            score_tile.set_head(args, coord.batch, head);
            for (int tile = order.first; order.has(tile); tile = order.after(tile))
                if (score_tile.full(tiles, tile)) iterate(Bool<false>{}, head, tile);
                else iterate(Bool<true>{}, head, tile);
        }
    }

    // Epilogue.
    const int num_keys = arrays.shape.seqlen_k;
    store_gradient<KeyGrid>(
        d2k, arrays.dk, arrays.dk_stride, coord, num_keys, arrays.shape.head_dim);
    store_gradient<ValueGrid>(
        d2v, arrays.dv, arrays.dv_stride, coord, num_keys, arrays.shape.head_dim_v);
}
