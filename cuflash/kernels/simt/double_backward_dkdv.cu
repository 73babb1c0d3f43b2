// The gradient of backward attention on CUDA cores; correct, not optimised. First of two passes:
//
//     d2K = scale ((g dS)^T ddQ + T_X^T Q),  d2V = (P (W - b))^T dO     double_backward.cuh
//
// A block owns a tile of keys and visits the query tiles of all query heads that read them, so that
// no two blocks add to the same number: no atomics, and every run gives the same bits. D and F come
// from prepare/double_delta.cu, b and ddO from a JVP, d2Q from simt/double_backward_dq.cu. After
// sm90/double_backward.cu both compute the tiles that are flagged (tile_flags.cuh), and no others.
//
// Grid and block: those of simt/backward_dkdv.cu.
// Constants: those of simt/backward_dkdv.cu; Q_DOT to MOD_DOT: which
// gradients the loss depends on.
// Shared memory, in Real:
//     k, k_dot       BLOCK_K * (HEAD_DIM + 1) each     v, v_dot  BLOCK_K * (HEAD_DIM_V + 1) each
//     q, q_dot       BLOCK_Q * (HEAD_DIM + 1) each     dout      BLOCK_Q * (HEAD_DIM_V + 1)
//     tx, ds, p_dot  BLOCK_K * (BLOCK_Q + 1) each      queries   4 * BLOCK_Q
//
// Bad at: speed, as simt/forward.cu; all products are computed here and once more for d2Q.
#include "simt/double_backward.cuh"
#include "common/flagged_tiles.cuh"
#include "common/tile_flags.cuh"

constexpr int THREADS_PER_ROW = NUM_THREADS / BLOCK_K;
constexpr int QUERIES_PER_THREAD = (BLOCK_Q + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
constexpr int K_COLUMNS = HEAD_DIM / THREADS_PER_ROW, V_COLUMNS = HEAD_DIM_V / THREADS_PER_ROW;

static_assert(NUM_THREADS % BLOCK_K == 0, "every key has as many threads");
static_assert(HEAD_DIM % THREADS_PER_ROW == 0, "every thread has as many columns of d2K");
static_assert(HEAD_DIM_V % THREADS_PER_ROW == 0, "every thread has as many columns of d2V");

struct SharedPlan {
    Real k[BLOCK_K][HEAD_DIM + 1], k_dot[BLOCK_K][HEAD_DIM + 1];
    Real v[BLOCK_K][HEAD_DIM_V + 1], v_dot[BLOCK_K][HEAD_DIM_V + 1];
    Real q[BLOCK_Q][HEAD_DIM + 1], q_dot[BLOCK_Q][HEAD_DIM + 1];
    Real dout[BLOCK_Q][HEAD_DIM_V + 1];
    Real tx[BLOCK_K][BLOCK_Q + 1], ds[BLOCK_K][BLOCK_Q + 1], p_dot[BLOCK_K][BLOCK_Q + 1];
    SecondQuery queries[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// One key's sums, of which a thread has its columns.
struct Gradients {
    Real d2k[K_COLUMNS] = {};
    Real d2v[V_COLUMNS] = {};
};

// The products of a thread's key and its own queries.
inline void compute_products(
    Products (&products)[QUERIES_PER_THREAD], const SharedPlan& shared, int row,
    int thread_of_row) {
    Real s[QUERIES_PER_THREAD], dp[QUERIES_PER_THREAD], u[QUERIES_PER_THREAD] = {};
    Real of_q[QUERIES_PER_THREAD] = {}, of_k[QUERIES_PER_THREAD] = {};
    dot_products<QUERIES_PER_THREAD, HEAD_DIM>(
        s, shared.k[row], shared.q, thread_of_row, THREADS_PER_ROW);
    dot_products<QUERIES_PER_THREAD, HEAD_DIM_V>(
        dp, shared.v[row], shared.dout, thread_of_row, THREADS_PER_ROW);
    if constexpr (Q_DOT) dot_products<QUERIES_PER_THREAD, HEAD_DIM>(
        of_q, shared.k[row], shared.q_dot, thread_of_row, THREADS_PER_ROW);
    if constexpr (K_DOT) dot_products<QUERIES_PER_THREAD, HEAD_DIM>(
        of_k, shared.k_dot[row], shared.q, thread_of_row, THREADS_PER_ROW);
    if constexpr (V_DOT) dot_products<QUERIES_PER_THREAD, HEAD_DIM_V>(
        u, shared.v_dot[row], shared.dout, thread_of_row, THREADS_PER_ROW);
    for (int n = 0; n < QUERIES_PER_THREAD; ++n)
        products[n] = {s[n], of_q[n] + of_k[n], dp[n], u[n]};
}

// The tile's weights, transposed, to shared memory: a thread has its key's pairs with its own
// queries.
inline void weights(
    SharedPlan& shared, int row, int thread_of_row, const HeadOptions<Real>& options,
    const LseRests<Real>& rests, const HeadTangent<Real>& tangent, int q_start, int key,
    int shift) {
    Products products[QUERIES_PER_THREAD];
    compute_products(products, shared, row, thread_of_row);
    for (int n = 0; n < QUERIES_PER_THREAD; ++n) {
        const int i = thread_of_row + n * THREADS_PER_ROW;
        if (i >= BLOCK_Q) continue;
        const SecondWeight weight = second_weight_of(
            products[n], shared.queries[i], rests, options, tangent, q_start + i, key, shift);
        shared.tx[row][i] = weight.tx;
        shared.ds[row][i] = weight.ds;
        shared.p_dot[row][i] = weight.p_dot;
    }
}

// d2V += (P (W - b))^T dO, d2K += T_X^T Q + (g dS)^T ddQ over the tile's queries from first to end,
// those that see the key only: 0 * NaN is NaN. hidden(i): whether query i does not see it.
template <class Hidden>
inline void accumulate(
    Gradients& sums, const SharedPlan& shared, int row, int thread_of_row, int first, int end,
    Hidden hidden) {
    for (int i = first; i < end; ++i) {
        if (hidden(i)) continue;
        const Real tx = shared.tx[row][i], ds = shared.ds[row][i], p_dot = shared.p_dot[row][i];
        for (int n = 0; n < V_COLUMNS; ++n) {
            const int column = thread_of_row + n * THREADS_PER_ROW;
            sums.d2v[n] = fma(p_dot, shared.dout[i][column], sums.d2v[n]);
        }
        for (int n = 0; n < K_COLUMNS; ++n) {
            const int column = thread_of_row + n * THREADS_PER_ROW;
            sums.d2k[n] = fma(tx, shared.q[i][column], sums.d2k[n]);
            if constexpr (Q_DOT) sums.d2k[n] = fma(ds, shared.q_dot[i][column], sums.d2k[n]);
        }
    }
}

__device__ __forceinline__ void compute_tile(
    const Arguments& call_args, SharedPlan& shared, u32 index) {
    auto [k_tile, kv_head, batch] = key_tile_at(call_args, index);
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
    HeadOptions<Real> options(args, batch);

    SecondHead(args, batch, kv_head * group_size).load_keys(shared, args, k_start);
    Gradients sums;

    const QueryTiles tiles = mask.query_tiles(k_start, BLOCK_Q, BLOCK_K);
    for (int member = 0; member < group_size; ++member) {
        const int head_index = kv_head * group_size + member;
        const SecondHead head(args, batch, head_index);
        const HeadTangent<Real> tangent(args, 0, batch, head_index);
        options.set_head(args, batch, head_index);
        const int q_end = WINDOW ? min(tiles.end * BLOCK_Q, shape.seqlen_q) : shape.seqlen_q;
        for (int q_start = tiles.first * BLOCK_Q; q_start < q_end; q_start += BLOCK_Q) {
            if (options.pair_mask.skips(q_start / BLOCK_Q, k_start / BLOCK_K)) continue;
            head.load_queries(shared, args, q_start);
            const int num_queries = min(BLOCK_Q, shape.seqlen_q - q_start);
            for (int i = threadIdx.x; i < BLOCK_Q; i += NUM_THREADS)
                shared.queries[i] =
                    i < num_queries ? head.query(q_start + i) : SecondQuery{0, 0, 0, 0};
            __syncthreads();                                // the tile and the keys are there
            weights(shared, row, thread_of_row, options, head.rests, tangent, q_start, key,
                    shape.seqlen_k - shape.seqlen_q);
            __syncthreads();                                // the weights are there
            accumulate(
                sums, shared, row, thread_of_row, mask.clamp(first_query - q_start, 0, BLOCK_Q),
                WINDOW ? min(num_queries, end_query - q_start) : num_queries,
                [&](int i) { return is_masked(options, q_start + i, key); });
            __syncthreads();                                // the tile and the weights are free
        }
    }

    if (key >= shape.seqlen_k) return;
    const Strides &dks = arrays.dk_stride, &dvs = arrays.dv_stride;
    Element* d2k = static_cast<Element*>(arrays.dk)
        + batch * dks.batch + key * dks.token + kv_head * dks.head;
    Element* d2v = static_cast<Element*>(arrays.dv)
        + batch * dvs.batch + key * dvs.token + kv_head * dvs.head;
    store_row(
        d2k, sums.d2k, Real(arrays.scale), thread_of_row, THREADS_PER_ROW, shape.head_dim);
    store_row(d2v, sums.d2v, Real(1), thread_of_row, THREADS_PER_ROW, shape.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
double_backward_simt_dkdv(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const Shape& shape = arrays_of(args).shape;
    const auto is_flagged = [&](u32 index) {
        const TileCoord coord = key_tile_at(args, index);
        return has_key_flag(args, coord.batch, coord.head, coord.tile * BLOCK_K);
    };
    for_each_tile(
        num_key_tiles(args, BLOCK_K) * shape.num_heads_kv * shape.batch, is_flagged,
        [&](u32 index) { compute_tile(args, shared, index); });
}
