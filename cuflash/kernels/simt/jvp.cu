// Forward attention and its derivative along directions, on CUDA cores; correct, not optimised.
//
//     O = P V,  b = rowsum(P * W) = lse',  O' = (P * W) V + P V' - b O
//
// with W, the tangent of the scores, from score/tangents.cuh. As simt/forward.cu: online softmax
// over key tiles. With a reference r of W in its row (score/row_reference.cuh), the sums
// b = rowsum(P * (W - r)) and acc_dot = (P * (W - r)) V + P V' are rescaled as l and acc are. A
// sink adds its weight times s' - r to b; dropout's Z multiplies P where it meets V or V', but not
// in b. Each direction computes O and lse anew; the first one stores them. After sm90/jvp.cu it
// computes the rows that are flagged (row_flags.cuh), and no others.
//
// Grid: one block per tile of BLOCK_Q queries of one head and direction,
//     blockIdx.x = ((order * batch + batch_index) * num_heads_q + head) * directions + direction
// with order = q_tile, or num_q_tiles - 1 - q_tile if CAUSAL: the longest tiles start first.
// Block: NUM_THREADS threads, NUM_THREADS / BLOCK_Q of them a query (simt.cuh).
//
// Constants: those of simt/forward.cu; Q_DOT to MOD_DOT: what moves.
// Shared memory, in Real:
//     q, q_dot    BLOCK_Q * (HEAD_DIM + 1) each
//     kv, kv_dot  BLOCK_K * (max(HEAD_DIM, HEAD_DIM_V) + 1) each      a tile of K, K', then V, V'
//     p, pw       BLOCK_Q * (BLOCK_K + 1) each          scores, then P; W, then P * (W - r)
//
// Bad at: speed, as simt/forward.cu; several directions share nothing.
#include "common/types.cuh"
#include "common/mask.cuh"
#include "simt/simt.cuh"
#include "simt/tiles.cuh"
#include "score/head_options.cuh"
#include "score/row_reference.cuh"
#include "score/tangents.cuh"
#include "common/flagged_tiles.cuh"
#include "common/row_flags.cuh"

constexpr int THREADS_PER_ROW = NUM_THREADS / BLOCK_Q;
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
constexpr int KEYS_PER_THREAD = (BLOCK_K + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
constexpr int COLUMNS_PER_THREAD = HEAD_DIM_V / THREADS_PER_ROW;

static_assert(NUM_THREADS % BLOCK_Q == 0, "every query has as many threads");
static_assert(HEAD_DIM % THREADS_PER_ROW == 0, "room for a sum of each of a row's threads");
static_assert(HEAD_DIM_V % THREADS_PER_ROW == 0, "every thread has as many columns");

struct SharedPlan {
    Real q[BLOCK_Q][HEAD_DIM + 1], q_dot[BLOCK_Q][HEAD_DIM + 1];
    Real kv[BLOCK_K][WIDEST + 1], kv_dot[BLOCK_K][WIDEST + 1];
    Real p[BLOCK_Q][BLOCK_K + 1], pw[BLOCK_Q][BLOCK_K + 1];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// A query's state after some of the keys, relative to m as in simt/forward.cu: l and b are a
// thread's parts of the sums over keys; acc and acc_dot its columns. r is 0 before the first key.
struct State {
    Real m = -infinity(), r = 0;
    Real l = 0, b = 0;
    Real acc[COLUMNS_PER_THREAD] = {}, acc_dot[COLUMNS_PER_THREAD] = {};

    // But for l.
    void rescale(Real factor) {
        b *= factor;
        for (int n = 0; n < COLUMNS_PER_THREAD; ++n) {
            acc[n] *= factor;
            acc_dot[n] *= factor;
        }
    }
};

// One head's pieces of all arrays, in one direction; an input that does not move has no tangent.
struct Head {
    const Element *q, *k, *v, *q_dot, *k_dot, *v_dot;

    Head(const Arguments& args, int direction, int batch, int head) {
        const ForwardArguments& a = arrays_of(args);
        const TangentNumbers& moves = args.tangents;
        const int kv_head = head / (a.shape.num_heads_q / a.shape.num_heads_kv);
        q = head_start(a.q, a.q_stride, batch, head);
        k = head_start(a.k, a.k_stride, batch, kv_head);
        v = head_start(a.v, a.v_stride, batch, kv_head);
        q_dot = head_start(args.q_dot, moves.q_dot, direction, batch, head);
        k_dot = head_start(args.k_dot, moves.k_dot, direction, batch, kv_head);
        v_dot = head_start(args.v_dot, moves.v_dot, direction, batch, kv_head);
    }

    void load_queries(SharedPlan& shared, const Arguments& args, int start) const {
        const ForwardArguments& a = arrays_of(args);
        load_tile<BLOCK_Q, HEAD_DIM>(
            shared.q, q, a.q_stride.token, start, a.shape.seqlen_q, a.shape.head_dim);
        if constexpr (Q_DOT) load_tile<BLOCK_Q, HEAD_DIM>(
            shared.q_dot, q_dot, args.tangents.q_dot.token, start, a.shape.seqlen_q,
            a.shape.head_dim);
    }
    void load_keys(SharedPlan& shared, const Arguments& args, int start) const {
        const ForwardArguments& a = arrays_of(args);
        load_tile<BLOCK_K, HEAD_DIM>(
            shared.kv, k, a.k_stride.token, start, a.shape.seqlen_k, a.shape.head_dim);
        if constexpr (K_DOT) load_tile<BLOCK_K, HEAD_DIM>(
            shared.kv_dot, k_dot, args.tangents.k_dot.token, start, a.shape.seqlen_k,
            a.shape.head_dim);
    }
    void load_values(SharedPlan& shared, const Arguments& args, int start) const {
        const ForwardArguments& a = arrays_of(args);
        load_tile<BLOCK_K, HEAD_DIM_V>(
            shared.kv, v, a.v_stride.token, start, a.shape.seqlen_k, a.shape.head_dim_v);
        if constexpr (V_DOT) load_tile<BLOCK_K, HEAD_DIM_V>(
            shared.kv_dot, v_dot, args.tangents.v_dot.token, start, a.shape.seqlen_k,
            a.shape.head_dim_v);
    }
};

// Scores x of the thread's own keys, and their tangents w.
struct Scores { Real x[KEYS_PER_THREAD], w[KEYS_PER_THREAD]; };

// Those of the whole row stand in shared.p and shared.pw, too.
inline void compute_scores(
    Scores& own, SharedPlan& shared, int row, int thread_of_row, const ScoreMod<Real>& score_mod,
    const HeadTangent<Real>& tangent, int query, int k_start, int shift) {
    Real of_k[KEYS_PER_THREAD] = {};
    dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        own.x, shared.q[row], shared.kv, thread_of_row, THREADS_PER_ROW);
    for (int n = 0; n < KEYS_PER_THREAD; ++n) own.w[n] = 0;
    if constexpr (Q_DOT) dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        own.w, shared.q_dot[row], shared.kv, thread_of_row, THREADS_PER_ROW);
    if constexpr (K_DOT) dot_products<KEYS_PER_THREAD, HEAD_DIM>(
        of_k, shared.q[row], shared.kv_dot, thread_of_row, THREADS_PER_ROW);
    for (int n = 0; n < KEYS_PER_THREAD; ++n) {
        const int j = thread_of_row + n * THREADS_PER_ROW;
        Derivatives<Real> derivatives;
        own.x[n] = score_mod.score(
            own.x[n], Real(query + shift - k_start - j), query, k_start + j, derivatives);
        own.w[n] = tangent.of(
            score_mod, derivatives, score_mod.scale * (own.w[n] + of_k[n]), query, k_start + j);
        if (j >= BLOCK_K) continue;
        shared.p[row][j] = own.x[n];
        if constexpr (SCORES_MOVE) shared.pw[row][j] = own.w[n];
    }
}

// The mean of a row's W, by weight, over the tile's visible keys, whose largest score is m; 0 if it
// cannot be a reference.
template <class Masked>
inline Real mean_of_tangents(
    const Real (&x)[BLOCK_K + 1], const Real (&w)[BLOCK_K + 1], Real m, Visible visible,
    Masked masked) {
    Real weights = 0, sum = 0;
    #pragma unroll 1
    for (int j = visible.first; j < visible.end; ++j) {
        if (masked(j)) continue;
        const Real weight = exp(x[j] - m);
        weights += weight;
        sum = fma(weight, w[j], sum);
    }
    const Real mean = sum / weights;
    return is_reference(mean) ? mean : Real(0);
}

// The step of online_softmax.cuh with
//     pw = P (W - r),  b' = b exp(m - m') + rowsum(pw)
// for the tile's visible keys. P and pw of them, times Z, go to the row of shared memory.
// One barrier inside: a row is overwritten when all its threads have read it.
// masked(j): whether key j is masked within the visible range. z(j): the pair's factor of dropout.
template <class Masked, class Factor>
inline void softmax_step(
    State& state, Real (&p)[BLOCK_K + 1], Real (&pw)[BLOCK_K + 1], const Scores& own,
    int thread_of_row, Visible visible, Masked masked, Factor z) {
    const NaturalExp<Real> exp;
    const Real old_m = state.m;
    const Real reference = raise_max(
        exp, state.m, state.l, max_of_visible(old_m, p, visible, masked),
        [&](Real factor) { state.rescale(factor); });
    if (SCORES_MOVE && old_m == -infinity() && state.m != old_m)
        state.r = mean_of_tangents(p, pw, reference, visible, masked);
    __syncthreads();
    Real sum = 0, sum_of_w = 0;
    for (int n = 0; n < KEYS_PER_THREAD; ++n) {
        const int j = thread_of_row + n * THREADS_PER_ROW;
        if (j < visible.first || j >= visible.end || masked(j)) continue;
        const Real weight = exp(own.x[n], reference), w = own.w[n] - state.r;
        const Real kept = DROPOUT ? weight * z(j) : weight;
        sum += weight;
        p[j] = kept;
        if constexpr (SCORES_MOVE) {
            sum_of_w += weight * w;
            pw[j] = kept * w;
        }
    }
    state.l += sum;
    state.b += sum_of_w;
}

// acc += P V,  acc_dot += pw V + P V', over the visible keys only: 0 * NaN is NaN.
template <class Masked>
inline void accumulate(
    State& state, const SharedPlan& shared, int row, int thread_of_row, Visible visible,
    Masked masked) {
    for (int j = visible.first; j < visible.end; ++j) {
        if (masked(j)) continue;
        const Real p = shared.p[row][j];
        for (int n = 0; n < COLUMNS_PER_THREAD; ++n) {
            const int column = thread_of_row + n * THREADS_PER_ROW;
            const Real v = shared.kv[j][column];
            state.acc[n] = fma(p, v, state.acc[n]);
            if constexpr (SCORES_MOVE)
                state.acc_dot[n] = fma(shared.pw[row][j], v, state.acc_dot[n]);
            if constexpr (V_DOT)
                state.acc_dot[n] = fma(p, shared.kv_dot[j][column], state.acc_dot[n]);
        }
    }
}

// l and b of the row, the sums of its threads' parts, added in one order by all of them. Q and Q'
// are done with. Called by the whole block.
inline void add_parts(State& state, SharedPlan& shared, int row, int thread_of_row) {
    __syncthreads();
    shared.q[row][thread_of_row] = state.l;
    shared.q_dot[row][thread_of_row] = state.b;
    __syncthreads();
    state.l = state.b = 0;
    for (int t = 0; t < THREADS_PER_ROW; ++t) {
        state.l += shared.q[row][t];
        state.b += shared.q_dot[row][t];
    }
}

// Which results are stored; with PACKED only the call's own arguments tell.
struct Wanted { bool out, out_dot; };

// O = acc / l, lse = m + log(l), O' = acc_dot / l - (b / l) O, lse' = r + b / l. Without a key, or
// with scores of -inf only, l is 0 and the others are 0 or NaN: they are the results.
inline void store(
    const State& state, const Arguments& args, Wanted wanted, int direction, int batch, int head,
    int query, int thread_of_row) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Strides& os = arrays.out_stride;
    const DirectionStrides& ods = args.tangents.out_dot;
    Element* out = static_cast<Element*>(arrays.out)
        + batch * os.batch + query * os.token + head * os.head;
    Element* out_dot = static_cast<Element*>(args.out_dot) + direction * ods.direction
        + batch * ods.batch + query * ods.token + head * ods.head;
    const Real l = state.l == 0 ? Real(1) : state.l, b = state.b / l;
    for (int n = 0; n < COLUMNS_PER_THREAD; ++n) {
        const int column = thread_of_row + n * THREADS_PER_ROW;
        if (column >= shape.head_dim_v) continue;
        const Real o = state.acc[n] / l, tangent = state.acc_dot[n] / l;
        if (wanted.out && direction == 0) out[column] = from_accumulator<Element>(o);
        if (wanted.out_dot)
            out_dot[column] = from_accumulator<Element>(fma(-b, o, tangent));
    }
    if (thread_of_row != 0) return;
    const i64 heads = i64(shape.batch) * shape.num_heads_q, rows = rows_of_head(args);
    const i64 index = (i64(batch) * shape.num_heads_q + head) * rows + query;
    if (arrays.lse && direction == 0)
        static_cast<Real*>(arrays.lse)[index] = lse_of_row(state.m, state.l);
    if (args.lse_dot)
        static_cast<Real*>(args.lse_dot)[direction * heads * rows + index] = state.r + b;
}

__device__ __forceinline__ void compute_tile(
    const Arguments& call_args, SharedPlan& shared, u32 index) {
    const int directions = call_args.tangents.num_directions, direction = index % directions;
    auto [q_tile, head, batch] = query_tile_at(call_args, index / directions);
    const auto sequence = sequence_of_block<false>(call_args, q_tile, BLOCK_Q, CAUSAL);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const Shape& shape = arrays_of(args).shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_start = q_tile * BLOCK_Q;
    const Head own_head(args, direction, batch, head);

    // Which query of the tile, and which of its threads.
    const int row = threadIdx.x / THREADS_PER_ROW, thread_of_row = threadIdx.x % THREADS_PER_ROW;
    const int query = q_start + row;
    const int num_keys = query < shape.seqlen_q ? mask.num_keys(query) : 0;
    const int first_key = mask.first_key(query);
    HeadOptions<Real> options(args, batch);
    options.set_head(args, batch, head);
    const HeadTangent<Real> tangent(args, direction, batch, head);

    own_head.load_queries(shared, args, q_start);
    State state;

    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int k_end = tiles.num_visited * BLOCK_K;
    for (int k_start = tiles.first * BLOCK_K; k_start < k_end; k_start += BLOCK_K) {
        if (options.pair_mask.skips(q_start / BLOCK_Q, k_start / BLOCK_K)) continue;
        const Visible visible = visible_keys(first_key, num_keys, k_start);
        const auto masked = [&](int j) {
            return PAIRWISE && !options.pair_mask.visible(query, k_start + j);
        };
        const auto z = [&](int j) { return options.dropout.z(query, k_start + j); };

        // x, the scores of S = Q K^T, and their tangents
        own_head.load_keys(shared, args, k_start);
        __syncthreads();                                    // K, K', the first time Q, Q'
        Scores own;
        compute_scores(own, shared, row, thread_of_row, options.score_mod, tangent, query,
                       k_start, shape.seqlen_k - shape.seqlen_q);
        __syncthreads();                                    // the scores are there

        own_head.load_values(shared, args, k_start);
        softmax_step(state, shared.p[row], shared.pw[row], own, thread_of_row, visible, masked, z);
        __syncthreads();                                    // V, V' and the weights are there
        accumulate(state, shared, row, thread_of_row, visible, masked);
        __syncthreads();                                    // V, V' and the weights are done with
    }

    add_parts(state, shared, row, thread_of_row);
    if (query >= shape.seqlen_q) return;
    if constexpr (SINK) {
        const WithSink<Real> with_sink(state.m, state.l, sink_of<Real>(args, head));
        state.rescale(with_sink.rescale);
        state.m = with_sink.top;
        state.l = with_sink.sum;
        state.b += with_sink.weight * (sink_tangent_of<Real>(args, direction, head) - state.r);
    }
    const Wanted wanted{arrays_of(call_args).out != nullptr, call_args.out_dot != nullptr};
    store(state, args, wanted, direction, batch, head, query, thread_of_row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
jvp_simt(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const Shape& shape = arrays_of(args).shape;
    const int directions = args.tangents.num_directions;
    const auto is_flagged = [&](u32 index) {
        const TileCoord coord = query_tile_at(args, index / directions);
        return has_flag(args, index % directions * shape.batch + coord.batch, coord.head,
                        coord.tile * BLOCK_Q, BLOCK_Q);
    };
    for_each_tile(
        num_query_tiles(args, BLOCK_Q) * shape.num_heads_q * shape.batch * directions, is_flagged,
        [&](u32 index) { compute_tile(args, shared, index); });
}
