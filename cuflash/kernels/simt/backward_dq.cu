// Backward attention on CUDA cores; correct, not optimised. Second of two passes: dQ.
//
//     dQ = scale dS K                              with dS from backward.cuh
//
// A block owns a tile of queries and visits the key tiles that they see. delta comes from
// prepare/delta.cu, dK and dV from simt/backward_dkdv.cu.
//
// Grid: one block per tile of BLOCK_Q queries of one head,
//     blockIdx.x = (order * batch + batch_index) * num_heads_q + head
// with order = q_tile, or num_q_tiles - 1 - q_tile if CAUSAL: the longest tiles start first.
// Block: NUM_THREADS threads, NUM_THREADS / BLOCK_Q of them a query (simt.cuh).
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_THREADS, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V,
// the head dimensions rounded up to multiples of NUM_THREADS / BLOCK_Q; Arguments and the options
// (docs/guide/options.md).
// Shared memory, in Real:
//     q   BLOCK_Q * (HEAD_DIM + 1)             dout   BLOCK_Q * (HEAD_DIM_V + 1)
//     k   BLOCK_K * (HEAD_DIM + 1)             v      BLOCK_K * (HEAD_DIM_V + 1)
//     ds  BLOCK_Q * (BLOCK_K + 1)
//
// Bad at: speed, as simt/forward.cu.
#include "simt/backward.cuh"
#include "simt/row_pairs.cuh"
#include "score/dbias.cuh"

constexpr int THREADS_PER_ROW = NUM_THREADS / BLOCK_Q;
constexpr int KEYS_PER_THREAD = (BLOCK_K + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
constexpr int COLUMNS_PER_THREAD = HEAD_DIM / THREADS_PER_ROW;

static_assert(NUM_THREADS % BLOCK_Q == 0, "every query has as many threads");
static_assert(HEAD_DIM % THREADS_PER_ROW == 0, "every thread has as many columns of dQ");

using Pairs = RowPairs<THREADS_PER_ROW, KEYS_PER_THREAD>;

struct SharedPlan {
    Real q[BLOCK_Q][HEAD_DIM + 1];
    Real dout[BLOCK_Q][HEAD_DIM_V + 1];
    Real k[BLOCK_K][HEAD_DIM + 1];
    Real v[BLOCK_K][HEAD_DIM_V + 1];
    Real ds[BLOCK_Q][BLOCK_K + 1];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// dS of the tile, to shared memory: a thread has its query's pairs with its own keys.
// sees(j): whether the query sees the tile's key j.
template <class Sees>
inline void score_gradients(
    SharedPlan& shared, int row, int thread_of_row, const Query& query,
    const LseRests<Real>& rests, const HeadOptions<Real>& options, int i, int k_start, int shift,
    Sees sees, const BiasGradient& dbias) {
    Real s[KEYS_PER_THREAD], dp[KEYS_PER_THREAD];
    dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        s, shared.q[row], shared.k, thread_of_row, THREADS_PER_ROW);
    dot_products<KEYS_PER_THREAD, HEAD_DIM_V>(
        dp, shared.dout[row], shared.v, thread_of_row, THREADS_PER_ROW);
    const Pairs pairs{i, k_start + thread_of_row};
    ScoreMod<Real>::ArraySums<Pairs> sums;
    for (int n = 0; n < KEYS_PER_THREAD; ++n) {
        const int j = thread_of_row + n * THREADS_PER_ROW;
        if (j < BLOCK_K) {
            const Weight weight =
                weight_of(s[n], dp[n], query, rests, options, i, k_start + j, shift);
            shared.ds[row][j] = weight.ds;
            if (DBIAS && sees(j))
                dbias.add(i, k_start + j, SCORE_MOD ? weight.ds_score * weight.derivatives.by_bias
                                                    : weight.ds_score);
            else if (DBIAS)
                dbias.add_masked(i, k_start + j);
            if (DMOD && sees(j))
                options.score_mod.add_gradients(
                    sums, pairs, 0, n, weight.derivatives, weight.ds_score);
        }
    }
    options.score_mod.finish_gradients(sums, pairs);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_simt_dq(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    auto [q_tile, head_index, batch] = query_tile_at(call_args, blockIdx.x);
    const auto sequence = sequence_of_block<false>(call_args, q_tile, BLOCK_Q, CAUSAL);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_start = q_tile * BLOCK_Q;
    const Head head(args, batch, head_index);

    // Which query of the tile, and which of its threads.
    const int row = threadIdx.x / THREADS_PER_ROW, thread_of_row = threadIdx.x % THREADS_PER_ROW;
    const int i = q_start + row;
    const Query query = i < shape.seqlen_q ? head.query(i) : Query{0, 0};
    const int num_keys = i < shape.seqlen_q ? mask.num_keys(i) : 0;
    const int first_key = mask.first_key(i);
    const Real scale = arrays.scale;
    HeadOptions<Real> options(args, batch);
    options.set_head(args, batch, head_index);
    BiasGradient dbias;
    dbias.set_head(args, batch, head_index);

    const Strides &qs = arrays.q_stride, &ks = arrays.k_stride;
    const Strides &vs = arrays.v_stride, &dos = arrays.dout_stride;
    load_tile<BLOCK_Q, HEAD_DIM>(
        shared.q, head.q, qs.token, q_start, shape.seqlen_q, shape.head_dim);
    load_tile<BLOCK_Q, HEAD_DIM_V>(
        shared.dout, head.dout, dos.token, q_start, shape.seqlen_q, shape.head_dim_v);
    Real dq[COLUMNS_PER_THREAD] = {};                       // this thread's columns

    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int k_end = tiles.num_visited * BLOCK_K;
    for (int k_start = tiles.first * BLOCK_K; k_start < k_end; k_start += BLOCK_K) {
        if (options.pair_mask.skips(q_start / BLOCK_Q, k_start / BLOCK_K)) continue;
        load_tile<BLOCK_K, HEAD_DIM>(
            shared.k, head.k, ks.token, k_start, shape.seqlen_k, shape.head_dim);
        load_tile<BLOCK_K, HEAD_DIM_V>(
            shared.v, head.v, vs.token, k_start, shape.seqlen_k, shape.head_dim_v);
        __syncthreads();                                    // the tile and Q, dO are there
        const auto sees = [&](int j) {
            const Visible visible = visible_keys(first_key, num_keys, k_start);
            return j >= visible.first && j < visible.end && !is_masked(options, i, k_start + j);
        };
        score_gradients(shared, row, thread_of_row, query, head.rests, options, i, k_start,
                        shape.seqlen_k - shape.seqlen_q, sees, dbias);
        __syncthreads();                                    // dS is there
        // dQ += dS K, over the visible keys only: 0 * NaN is NaN
        const Visible visible = visible_keys(first_key, num_keys, k_start);
        for (int j = visible.first; j < visible.end; ++j)
            if (!is_masked(options, i, k_start + j)) for (int n = 0; n < COLUMNS_PER_THREAD; ++n)
                dq[n] = fma(
                    shared.ds[row][j], shared.k[j][thread_of_row + n * THREADS_PER_ROW], dq[n]);
        __syncthreads();                                    // P, dS, Q and dO are free
    }

    if (i >= shape.seqlen_q) return;
    const Strides& dqs = arrays.dq_stride;
    Element* out = static_cast<Element*>(arrays.dq)
        + batch * dqs.batch + i * dqs.token + head_index * dqs.head;
    store_row(out, dq, scale, thread_of_row, THREADS_PER_ROW, shape.head_dim);
}
