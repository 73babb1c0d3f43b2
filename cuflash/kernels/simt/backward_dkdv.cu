// Backward attention on CUDA cores; correct, not optimised. First of two passes: dK and dV.
//
//     dV = P^T dO,  dK = scale dS^T Q              with P and dS from backward.cuh
//
// A block owns a tile of keys and visits the query tiles of all query heads that read them, so that
// no two blocks add to the same number: no atomics, and every run gives the same bits. delta comes
// from prepare/delta.cu, dQ from simt/backward_dq.cu.
//
// Grid: one block per tile of BLOCK_K keys of one key head,
//     blockIdx.x = (k_tile * batch + batch_index) * num_heads_kv + kv_head
// (if CAUSAL the first keys, which most queries see, start first).
// Block: NUM_THREADS threads, NUM_THREADS / BLOCK_K of them a key (simt.cuh).
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_THREADS, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V,
// the head dimensions rounded up to multiples of NUM_THREADS / BLOCK_K; Arguments and the options
// (docs/guide/options.md).
// Shared memory, in Real:
//     k      BLOCK_K * (HEAD_DIM + 1)          v      BLOCK_K * (HEAD_DIM_V + 1)
//     q      BLOCK_Q * (HEAD_DIM + 1)          dout   BLOCK_Q * (HEAD_DIM_V + 1)
//     p, ds  BLOCK_K * (BLOCK_Q + 1) each      queries  2 * BLOCK_Q
//
// Bad at: speed, as simt/forward.cu; S and dP are computed here and once more for dQ.
#include "simt/backward.cuh"

constexpr int THREADS_PER_ROW = NUM_THREADS / BLOCK_K;
constexpr int QUERIES_PER_THREAD = (BLOCK_Q + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
constexpr int K_COLUMNS = HEAD_DIM / THREADS_PER_ROW, V_COLUMNS = HEAD_DIM_V / THREADS_PER_ROW;

static_assert(NUM_THREADS % BLOCK_K == 0, "every key has as many threads");
static_assert(HEAD_DIM % THREADS_PER_ROW == 0, "every thread has as many columns of dK");
static_assert(HEAD_DIM_V % THREADS_PER_ROW == 0, "every thread has as many columns of dV");

struct SharedPlan {
    Real k[BLOCK_K][HEAD_DIM + 1];
    Real v[BLOCK_K][HEAD_DIM_V + 1];
    Real q[BLOCK_Q][HEAD_DIM + 1];
    Real dout[BLOCK_Q][HEAD_DIM_V + 1];
    Real p[BLOCK_K][BLOCK_Q + 1], ds[BLOCK_K][BLOCK_Q + 1];     // P^T, dS^T
    Query queries[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// One key's sums, of which a thread has its columns.
struct Gradients {
    Real dk[K_COLUMNS] = {};
    Real dv[V_COLUMNS] = {};
};

// P^T and dS^T of the tile, to shared memory: a thread has its key's pairs with its own queries.
inline void weights(
    SharedPlan& shared, int row, int thread_of_row, const HeadOptions<Real>& options,
    const LseRests<Real>& rests, int q_start, int key, int shift) {
    Real s[QUERIES_PER_THREAD], dp[QUERIES_PER_THREAD];
    dot_products<QUERIES_PER_THREAD, HEAD_DIM>(
        s, shared.k[row], shared.q, thread_of_row, THREADS_PER_ROW);
    dot_products<QUERIES_PER_THREAD, HEAD_DIM_V>(
        dp, shared.v[row], shared.dout, thread_of_row, THREADS_PER_ROW);
    for (int n = 0; n < QUERIES_PER_THREAD; ++n) {
        const int i = thread_of_row + n * THREADS_PER_ROW;
        if (i >= BLOCK_Q) continue;
        const Weight weight =
            weight_of(s[n], dp[n], shared.queries[i], rests, options, q_start + i, key, shift);
        shared.p[row][i] = weight.p;
        shared.ds[row][i] = weight.ds;
    }
}

// dV += P^T dO, dK += dS^T Q over the tile's queries from first to end, those that see the key
// only: 0 * NaN is NaN. hidden(i): whether query i does not see it all the same.
template <class Hidden>
inline void accumulate(
    Gradients& sums, const SharedPlan& shared, int row, int thread_of_row, int first, int end,
    Hidden hidden) {
    for (int i = first; i < end; ++i) {
        if (hidden(i)) continue;
        const Real p = shared.p[row][i], ds = shared.ds[row][i];
        for (int n = 0; n < V_COLUMNS; ++n)
            sums.dv[n] = fma(p, shared.dout[i][thread_of_row + n * THREADS_PER_ROW], sums.dv[n]);
        for (int n = 0; n < K_COLUMNS; ++n)
            sums.dk[n] = fma(ds, shared.q[i][thread_of_row + n * THREADS_PER_ROW], sums.dk[n]);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_simt_dkdv(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    auto [k_tile, kv_head, batch] = key_tile_at(call_args, blockIdx.x);
    const auto sequence = sequence_of_block<true>(call_args, k_tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int k_start = k_tile * BLOCK_K;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;

    // Which key of the tile, and which of its threads.
    const int row = threadIdx.x / THREADS_PER_ROW, thread_of_row = threadIdx.x % THREADS_PER_ROW;
    const int key = k_start + row;
    const int first_query = mask.first_query(key);          // seqlen_q if there is no such key
    const int end_query = mask.end_query(key);
    const Real scale = arrays.scale;
    HeadOptions<Real> options(args, batch);

    const Strides &qs = arrays.q_stride, &ks = arrays.k_stride;
    const Strides &vs = arrays.v_stride, &dos = arrays.dout_stride;
    const Head any(args, batch, kv_head * group_size);
    load_tile<BLOCK_K, HEAD_DIM>(
        shared.k, any.k, ks.token, k_start, shape.seqlen_k, shape.head_dim);
    load_tile<BLOCK_K, HEAD_DIM_V>(
        shared.v, any.v, vs.token, k_start, shape.seqlen_k, shape.head_dim_v);
    Gradients sums;

    const QueryTiles tiles = mask.query_tiles(k_start, BLOCK_Q, BLOCK_K);
    for (int member = 0; member < group_size; ++member) {
        const Head head(args, batch, kv_head * group_size + member);
        options.set_head(args, batch, kv_head * group_size + member);
        const int q_end = WINDOW ? min(tiles.end * BLOCK_Q, shape.seqlen_q) : shape.seqlen_q;
        for (int q_start = tiles.first * BLOCK_Q; q_start < q_end; q_start += BLOCK_Q) {
            if (options.pair_mask.skips(q_start / BLOCK_Q, k_start / BLOCK_K)) continue;
            load_tile<BLOCK_Q, HEAD_DIM>(
                shared.q, head.q, qs.token, q_start, shape.seqlen_q, shape.head_dim);
            load_tile<BLOCK_Q, HEAD_DIM_V>(
                shared.dout, head.dout, dos.token, q_start, shape.seqlen_q, shape.head_dim_v);
            const int num_queries = min(BLOCK_Q, shape.seqlen_q - q_start);
            for (int i = threadIdx.x; i < BLOCK_Q; i += NUM_THREADS)
                shared.queries[i] = i < num_queries ? head.query(q_start + i) : Query{0, 0};
            __syncthreads();                                // the tile and K, V are there
            weights(shared, row, thread_of_row, options, head.rests, q_start, key,
                    shape.seqlen_k - shape.seqlen_q);
            __syncthreads();                                // the weights are there
            accumulate(
                sums, shared, row, thread_of_row, mask.clamp(first_query - q_start, 0, BLOCK_Q),
                WINDOW ? min(num_queries, end_query - q_start) : num_queries,
                [&](int i) { return is_masked(options, q_start + i, key); });
            __syncthreads();                                // P, dS, Q and dO are free
        }
    }

    if (key >= shape.seqlen_k) return;
    const Strides &dks = arrays.dk_stride, &dvs = arrays.dv_stride;
    Element* dk = static_cast<Element*>(arrays.dk)
        + batch * dks.batch + key * dks.token + kv_head * dks.head;
    Element* dv = static_cast<Element*>(arrays.dv)
        + batch * dvs.batch + key * dvs.token + kv_head * dvs.head;
    store_row(dk, sums.dk, scale, thread_of_row, THREADS_PER_ROW, shape.head_dim);
    store_row(dv, sums.dv, Real(1), thread_of_row, THREADS_PER_ROW, shape.head_dim_v);
}
