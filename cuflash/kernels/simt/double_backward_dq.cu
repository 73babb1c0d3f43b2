// The gradient of backward attention on CUDA cores; correct, not optimised. Second of two passes:
//
//     d2Q = scale ((g dS) ddK + T_X K)             with dS and T_X from double_backward.cuh
//
// and d2bias = T. A block owns a tile of queries and visits the key tiles that they see. D and F
// come from prepare/double_delta.cu, b and ddO from a JVP, d2K and d2V from
// simt/double_backward_dkdv.cu.
//
// Grid and block: those of simt/backward_dq.cu.
// Constants: those of simt/backward_dq.cu; Q_DOT to MOD_DOT: which gradients
// the loss depends on.
// Shared memory, in Real:
//     q, q_dot  BLOCK_Q * (HEAD_DIM + 1) each      dout      BLOCK_Q * (HEAD_DIM_V + 1)
//     k, k_dot  BLOCK_K * (HEAD_DIM + 1) each      v, v_dot  BLOCK_K * (HEAD_DIM_V + 1) each
//     tx, ds    BLOCK_Q * (BLOCK_K + 1) each
//
// Bad at: speed, as simt/forward.cu.
#include "simt/double_backward.cuh"
#include "common/flagged_tiles.cuh"
#include "common/tile_flags.cuh"
#include "simt/row_pairs.cuh"
#include "score/dbias.cuh"

constexpr int THREADS_PER_ROW = NUM_THREADS / BLOCK_Q;
constexpr int KEYS_PER_THREAD = (BLOCK_K + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
constexpr int COLUMNS_PER_THREAD = HEAD_DIM / THREADS_PER_ROW;

static_assert(NUM_THREADS % BLOCK_Q == 0, "every query has as many threads");
static_assert(HEAD_DIM % THREADS_PER_ROW == 0, "every thread has as many columns of d2Q");

using Pairs = RowPairs<THREADS_PER_ROW, KEYS_PER_THREAD>;

struct SharedPlan {
    Real q[BLOCK_Q][HEAD_DIM + 1], q_dot[BLOCK_Q][HEAD_DIM + 1];
    Real dout[BLOCK_Q][HEAD_DIM_V + 1];
    Real k[BLOCK_K][HEAD_DIM + 1], k_dot[BLOCK_K][HEAD_DIM + 1];
    Real v[BLOCK_K][HEAD_DIM_V + 1], v_dot[BLOCK_K][HEAD_DIM_V + 1];
    Real tx[BLOCK_Q][BLOCK_K + 1], ds[BLOCK_Q][BLOCK_K + 1];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// The products of a thread's query and its own keys.
inline void compute_products(
    Products (&products)[KEYS_PER_THREAD], const SharedPlan& shared, int row, int thread_of_row) {
    Real s[KEYS_PER_THREAD], dp[KEYS_PER_THREAD], u[KEYS_PER_THREAD] = {};
    Real of_q[KEYS_PER_THREAD] = {}, of_k[KEYS_PER_THREAD] = {};
    dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        s, shared.q[row], shared.k, thread_of_row, THREADS_PER_ROW);
    dot_products<KEYS_PER_THREAD, HEAD_DIM_V>(
        dp, shared.dout[row], shared.v, thread_of_row, THREADS_PER_ROW);
    if constexpr (Q_DOT) dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        of_q, shared.q_dot[row], shared.k, thread_of_row, THREADS_PER_ROW);
    if constexpr (K_DOT) dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        of_k, shared.q[row], shared.k_dot, thread_of_row, THREADS_PER_ROW);
    if constexpr (V_DOT) dot_products<KEYS_PER_THREAD, HEAD_DIM_V>(
        u, shared.dout[row], shared.v_dot, thread_of_row, THREADS_PER_ROW);
    for (int n = 0; n < KEYS_PER_THREAD; ++n)
        products[n] = {s[n], of_q[n] + of_k[n], dp[n], u[n]};
}

// d2Q += T_X K + (g dS) ddK over the tile's visible keys only: 0 * NaN is NaN.
template <class Masked>
inline void accumulate(
    Real (&d2q)[COLUMNS_PER_THREAD], const SharedPlan& shared, int row, int thread_of_row,
    Visible visible, Masked masked) {
    for (int j = visible.first; j < visible.end; ++j) {
        if (masked(j)) continue;
        for (int n = 0; n < COLUMNS_PER_THREAD; ++n) {
            const int column = thread_of_row + n * THREADS_PER_ROW;
            d2q[n] = fma(shared.tx[row][j], shared.k[j][column], d2q[n]);
            if constexpr (K_DOT) d2q[n] = fma(shared.ds[row][j], shared.k_dot[j][column], d2q[n]);
        }
    }
}

__device__ __forceinline__ void compute_tile(
    const Arguments& call_args, SharedPlan& shared, u32 index) {
    auto [q_tile, head_index, batch] = query_tile_at(call_args, index);
    const auto sequence = sequence_of_block<false>(call_args, q_tile, BLOCK_Q, CAUSAL);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_start = q_tile * BLOCK_Q;
    const SecondHead head(args, batch, head_index);

    // Which query of the tile, and which of its threads.
    const int row = threadIdx.x / THREADS_PER_ROW, thread_of_row = threadIdx.x % THREADS_PER_ROW;
    const int i = q_start + row;
    const SecondQuery query = i < shape.seqlen_q ? head.query(i) : SecondQuery{0, 0, 0, 0};
    const int num_keys = i < shape.seqlen_q ? mask.num_keys(i) : 0;
    const int first_key = mask.first_key(i);
    HeadOptions<Real> options(args, batch);
    options.set_head(args, batch, head_index);
    const HeadTangent<Real> tangent(args, 0, batch, head_index);
    BiasGradient d2bias;
    d2bias.set_head(args, batch, head_index);

    head.load_queries(shared, args, q_start);
    Real d2q[COLUMNS_PER_THREAD] = {};                      // this thread's columns

    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int k_end = tiles.num_visited * BLOCK_K;
    for (int k_start = tiles.first * BLOCK_K; k_start < k_end; k_start += BLOCK_K) {
        if (options.pair_mask.skips(q_start / BLOCK_Q, k_start / BLOCK_K)) continue;
        const Visible visible = visible_keys(first_key, num_keys, k_start);
        const auto masked = [&](int j) { return is_masked(options, i, k_start + j); };
        head.load_keys(shared, args, k_start);
        __syncthreads();                                    // the tile and Q, ddQ, dO are there
        Products products[KEYS_PER_THREAD];
        compute_products(products, shared, row, thread_of_row);
        const Pairs pairs{i, k_start + thread_of_row};
        ScoreMod<Real>::ArraySums<Pairs> array_sums;
        for (int n = 0; n < KEYS_PER_THREAD; ++n) {
            const int j = thread_of_row + n * THREADS_PER_ROW;
            if (j >= BLOCK_K) continue;
            const SecondWeight weight = second_weight_of(
                products[n], query, head.rests, options, tangent, i, k_start + j,
                shape.seqlen_k - shape.seqlen_q);
            shared.tx[row][j] = weight.tx;
            shared.ds[row][j] = weight.ds;
            if (!(DBIAS || DMOD) || j < visible.first || j >= visible.end || masked(j)) continue;
            if constexpr (DBIAS) d2bias.add(i, k_start + j, weight.t_bias);
            options.score_mod.add_second_gradients(
                array_sums, pairs, 0, n, weight.motion, weight.t, weight.ds_of_score);
        }
        options.score_mod.finish_gradients(array_sums, pairs);
        __syncthreads();                                    // T_X and dS are there
        accumulate(d2q, shared, row, thread_of_row, visible, masked);
        __syncthreads();                                    // the tile and T_X, dS are free
    }

    if (i >= shape.seqlen_q) return;
    const Strides& dqs = arrays.dq_stride;
    Element* out = static_cast<Element*>(arrays.dq)
        + batch * dqs.batch + i * dqs.token + head_index * dqs.head;
    store_row(out, d2q, Real(arrays.scale), thread_of_row, THREADS_PER_ROW, shape.head_dim);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
double_backward_simt_dq(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const Shape& shape = arrays_of(args).shape;
    const auto is_flagged = [&](u32 index) {
        const TileCoord coord = query_tile_at(args, index);
        return has_query_flag(args, coord.batch, coord.head, coord.tile * BLOCK_Q);
    };
    for_each_tile(
        num_query_tiles(args, BLOCK_Q) * shape.num_heads_q * shape.batch, is_flagged,
        [&](u32 index) { compute_tile(args, shared, index); });
}
