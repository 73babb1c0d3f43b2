// Forward attention on CUDA cores; correct, not optimised: O = softmax(scale Q K^T) V and lse.
// Online softmax over key tiles (Milakov & Gimelshein 2018, arXiv:1805.02867; FlashAttention-2,
// arXiv:2307.08691, Algorithm 1). No fast arithmetic: exp and log are the library's, sums are fused
// multiply-adds of Real (simt.cuh). 16-bit elements are rounded once, when they are stored.
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
//     q   BLOCK_Q * (HEAD_DIM + 1)
//     kv  BLOCK_K * (max(HEAD_DIM, HEAD_DIM_V) + 1)     a tile of K, then the same tile of V
//     p   BLOCK_Q * (BLOCK_K + 1)                       scores, then weights
//
// Bad at: speed: one row's products at a time come from shared memory, nothing is loaded ahead.
#include "common/types.cuh"
#include "common/mask.cuh"
#include "simt/simt.cuh"
#include "simt/tiles.cuh"
#include "score/head_options.cuh"
#include "score/max_score.cuh"

constexpr int THREADS_PER_ROW = NUM_THREADS / BLOCK_Q;
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
constexpr int KEYS_PER_THREAD = (BLOCK_K + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
constexpr int COLUMNS_PER_THREAD = HEAD_DIM_V / THREADS_PER_ROW;

static_assert(NUM_THREADS % BLOCK_Q == 0, "every query has as many threads");
static_assert(HEAD_DIM % THREADS_PER_ROW == 0, "room for a sum of each of a row's threads");
static_assert(HEAD_DIM_V % THREADS_PER_ROW == 0, "every thread has as many columns");

struct SharedPlan {
    Real q[BLOCK_Q][HEAD_DIM + 1];
    Real kv[BLOCK_K][WIDEST + 1];
    Real p[BLOCK_Q][BLOCK_K + 1];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// A query's state after some of the keys. m is known to all threads of its row; l is a thread's
// part of the sum, over the keys that are its own; acc its columns of the accumulator.
struct State {
    Real m = -infinity();
    Real l = 0;
    Real acc[COLUMNS_PER_THREAD] = {};
};

// x, the scores of the thread's own keys, and the whole row of them in shared.p.
inline void compute_scores(
    Real (&x)[KEYS_PER_THREAD], SharedPlan& shared, int row, int thread_of_row,
    const ScoreMod<Real>& score_mod, int query, int k_start, int shift) {
    dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        x, shared.q[row], shared.kv, thread_of_row, THREADS_PER_ROW);
    for (int n = 0; n < KEYS_PER_THREAD; ++n) {
        const int j = thread_of_row + n * THREADS_PER_ROW;
        x[n] = score_mod.score(
            x[n], Real(query + shift - k_start - j), query, k_start + j);
        if (j < BLOCK_K) shared.p[row][j] = x[n];
    }
}

// The step of online_softmax.cuh for the tile's visible keys, others having no weight. own: this
// thread's keys of x, the scores; the whole row stands in row, and the weights take its place.
// One barrier inside: a row is overwritten when all its threads have read it.
// masked(j): whether key j is masked within the visible range. z(j): the pair's factor of dropout.
template <class Masked, class Factor>
inline void softmax_step(
    State& state, Real (&row)[BLOCK_K + 1], const Real (&own)[KEYS_PER_THREAD],
    int thread_of_row, Visible visible, Masked masked, Factor z) {
    const NaturalExp<Real> exp;
    const Real reference = raise_max(
        exp, state.m, state.l, max_of_visible(state.m, row, visible, masked), [&](Real factor) {
            for (int n = 0; n < COLUMNS_PER_THREAD; ++n) state.acc[n] *= factor;
        });
    __syncthreads();
    Real sum = 0;                                           // see online_softmax.cuh
    for (int n = 0; n < KEYS_PER_THREAD; ++n) {
        const int j = thread_of_row + n * THREADS_PER_ROW;
        if (WINDOW && j < visible.first) continue;
        if (PAIRWISE && (j >= visible.end || masked(j))) continue;
        if (j < visible.end) sum += row[j] = exp(own[n], reference);
        if (DROPOUT && j < visible.end) row[j] *= z(j);
    }
    state.l += sum;
}

// acc += P V, over the visible keys only: 0 * NaN is NaN, so that the others cannot take part.
template <class Masked>
inline void accumulate(
    State& state, const Real (&row)[BLOCK_K + 1], const Real (&v)[BLOCK_K][WIDEST + 1],
    int thread_of_row, Visible visible, Masked masked) {
    for (int j = visible.first; j < visible.end; ++j)
        if (!masked(j)) for (int n = 0; n < COLUMNS_PER_THREAD; ++n)
            state.acc[n] = fma(row[j], v[j][thread_of_row + n * THREADS_PER_ROW], state.acc[n]);
}

// O = acc / l, lse = m + log(l). Without a key, or with scores of -inf only, l and lse are 0 and
// -inf, and acc is 0, or NaN where a weight of 0 met an infinite value or NaN: O is that.
inline void store(
    const State& state, Real l, const ForwardArguments& arrays, int batch, int head, int query,
    int rows_of_head, int thread_of_row) {
    const Shape& shape = arrays.shape;
    const Strides& os = arrays.out_stride;
    Element* out = static_cast<Element*>(arrays.out)
        + batch * os.batch + query * os.token + head * os.head;
    for (int n = 0; n < COLUMNS_PER_THREAD; ++n) {
        const int column = thread_of_row + n * THREADS_PER_ROW;
        if (column < shape.head_dim_v) out[column] = from_accumulator<Element>(
            state.acc[n] / (l == 0 ? Real(1) : l));
    }
    if (arrays.lse && thread_of_row == 0) {
        Real* lse = static_cast<Real*>(arrays.lse);
        const i64 index = (i64(batch) * shape.num_heads_q + head) * rows_of_head + query;
        lse[index] = lse_of_row(state.m, l);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
forward_simt(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    auto [q_tile, head, batch] = query_tile_at(call_args, blockIdx.x);
    const auto sequence = sequence_of_block<false>(call_args, q_tile, BLOCK_Q, CAUSAL);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_start = q_tile * BLOCK_Q;
    const int kv_head = head / (shape.num_heads_q / shape.num_heads_kv);

    const Strides &qs = arrays.q_stride, &ks = arrays.k_stride, &vs = arrays.v_stride;
    const Element* q = head_start(arrays.q, qs, batch, head);
    const Element* k = head_start(arrays.k, ks, batch, kv_head);
    const Element* v = head_start(arrays.v, vs, batch, kv_head);

    // Which query of the tile, and which of its threads.
    const int row = threadIdx.x / THREADS_PER_ROW, thread_of_row = threadIdx.x % THREADS_PER_ROW;
    const int query = q_start + row;
    const int num_keys = query < shape.seqlen_q ? mask.num_keys(query) : 0;
    const int first_key = mask.first_key(query);
    HeadOptions<Real> options(args, batch);
    options.set_head(args, batch, head);
    const PairMask& pair_mask = options.pair_mask;

    load_tile<BLOCK_Q, HEAD_DIM>(shared.q, q, qs.token, q_start, shape.seqlen_q, shape.head_dim);
    State state;

    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int k_end = tiles.num_visited * BLOCK_K;
    for (int k_start = tiles.first * BLOCK_K; k_start < k_end; k_start += BLOCK_K) {
        if (pair_mask.skips(q_start / BLOCK_Q, k_start / BLOCK_K)) continue;
        const Visible visible = visible_keys(first_key, num_keys, k_start);
        const auto masked = [&](int j) {
            return PAIRWISE && !pair_mask.visible(query, k_start + j);
        };
        const auto z = [&](int j) { return options.dropout.z(query, k_start + j); };

        // x, the scores of S = Q K^T
        load_tile<BLOCK_K, HEAD_DIM>(
            shared.kv, k, ks.token, k_start, shape.seqlen_k, shape.head_dim);
        __syncthreads();                                    // K, and the first time Q, are there
        Real x[KEYS_PER_THREAD];
        compute_scores(x, shared, row, thread_of_row, options.score_mod, query, k_start,
                       shape.seqlen_k - shape.seqlen_q);
        __syncthreads();                                    // the scores are there, K is done with

        load_tile<BLOCK_K, HEAD_DIM_V>(
            shared.kv, v, vs.token, k_start, shape.seqlen_k, shape.head_dim_v);
        softmax_step(state, shared.p[row], x, thread_of_row, visible, masked, z);
        __syncthreads();                                    // V and the weights are there
        accumulate(state, shared.p[row], shared.kv, thread_of_row, visible, masked);
        __syncthreads();                                    // V and the weights are done with
    }

    // l is the sum of the threads' parts, added in one order by all of them. Q is done with.
    __syncthreads();
    shared.q[row][thread_of_row] = state.l;
    __syncthreads();
    Real l = 0;
    for (int t = 0; t < THREADS_PER_ROW; ++t) l += shared.q[row][t];
    if (query >= shape.seqlen_q) return;
    if (MAX_SCORE && thread_of_row == 0)
        store_max_score(args, index_of_query(args, batch, head, query), state.m, Real(1), l);
    if constexpr (SINK) {
        const WithSink<Real> row_with_sink(state.m, l, sink_of<Real>(args, head));
        l = row_with_sink.sum;
        state.m = row_with_sink.top;
        for (int n = 0; n < COLUMNS_PER_THREAD; ++n) state.acc[n] *= row_with_sink.rescale;
    }

    store(state, l, arrays, batch, head, query, rows_of_head(args), thread_of_row);
}
