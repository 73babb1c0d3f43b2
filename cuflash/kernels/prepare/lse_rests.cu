// Runs before backward kernels of calls with a bias or slopes: what rounding took from lse, of rows
// where that shows (lse_rest.cuh). m and l are those of the row's scores, computed anew:
//
//     m = max S,  l = rowsum(exp(S - m)),  rest = (m - lse) + log l
//
// The caller's lse may cover more keys than the call's, as in context parallelism. It is the row's
// own if it is m + log l, rounded; otherwise the rest is 0 and P is exp(S - lse).
//
// Grid: one block per tile of BLOCK_Q queries of one head,
//     blockIdx.x = (batch * num_heads_q + head) * num_q_tiles + q_tile
// Most end as soon as they have seen lse. Block: NUM_THREADS threads, LANES of a warp a row; a
// thread has the rows thread / LANES + i * ROW_STEP and of them the keys lane + j * LANES.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_THREADS, SHARED_BYTES; Arguments and the
// options (docs/guide/options.md) on which scores depend.
// Shared memory, in Real: COLUMNS columns of a tile of Q and of one of K, rows of COLUMNS + 1.
//
// Bad at: speed: S on CUDA cores, nothing is loaded ahead.
#include "common/mask.cuh"
#include "simt/simt.cuh"
#include "score/lse_rest.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"

constexpr int LANES = 16, COLUMNS = 32, ROW_STEP = NUM_THREADS / LANES;
constexpr int ROWS = BLOCK_Q / ROW_STEP, KEYS = BLOCK_K / LANES;

static_assert(BLOCK_Q % ROW_STEP == 0 && BLOCK_K % LANES == 0, "threads have as many pairs");

struct SharedPlan {
    Real q[BLOCK_Q][COLUMNS + 1];
    Real k[BLOCK_K][COLUMNS + 1];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// A row's maximum m and sum l of exp(S - m), over some of its keys.
struct RowState {
    Real m = -infinity(), l = 0;
    void add(Real other_m, Real other_l) {
        const Real top = other_m > m ? other_m : m;
        const Real base = top == -infinity() ? Real(0) : top;
        l = l * exp(m - base) + other_l * exp(other_m - base);
        m = top;
    }
};

// The thread's products of the rows of Q from q_start on and the keys from k_start on.
inline void products(
    Real (&x)[ROWS][KEYS], SharedPlan& shared, const Element* q, i64 q_stride, const Element* k,
    i64 k_stride, const Shape& shape, int q_start, int k_start) {
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (int start = 0; start < shape.head_dim; start += COLUMNS) {
        __syncthreads();                                    // the columns before are done with
        load_tile<BLOCK_Q, COLUMNS>(
            shared.q, q + start, q_stride, q_start, shape.seqlen_q, shape.head_dim - start);
        load_tile<BLOCK_K, COLUMNS>(
            shared.k, k + start, k_stride, k_start, shape.seqlen_k, shape.head_dim - start);
        __syncthreads();                                    // the columns are there
        for (int d = 0; d < COLUMNS; ++d)
            #pragma unroll
            for (int i = 0; i < ROWS; ++i)
                #pragma unroll
                for (int j = 0; j < KEYS; ++j)
                    x[i][j] = fma(shared.q[row + i * ROW_STEP][d], shared.k[lane + j * LANES][d],
                                  x[i][j]);
    }
}

// The rest of a row whose own m and l these are, 0 if lse covers other keys. Before it is rounded,
// an lse of its own may differ from m + log l by what forward kernels lose that take S log2(e) as
// exponents of 2: half an ulp in each score and in m. But where an ulp is large, a score that is
// rounded otherwise here makes another m, and no P follows from that.
inline Real rest_of(const RowState& row, Real lse) {
    constexpr Real ROUNDOFF = sizeof(Real) == 4 ? Real(0x1p-24) : Real(0x1p-53);
    const Real most = 4 * ROUNDOFF * fabs(lse), slack = most < Real(0.5) ? most : Real(0.5);
    const Real log_l = log(row.l);
    const bool is_own = row.m + (log_l - slack) <= lse && lse <= row.m + (log_l + slack);
    return is_own ? (row.m - lse) + log_l : Real(0);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
lse_rests(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    const int num_heads = arrays_of(call_args).shape.num_heads_q;
    const int num_q_tiles = num_query_tiles(call_args, BLOCK_Q);
    int tile = blockIdx.x % num_q_tiles;
    const int pair = blockIdx.x / num_q_tiles, head = pair % num_heads, batch = pair / num_heads;
    const auto sequence = sequence_of_tile<false>(call_args, tile, BLOCK_Q);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const auto& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int q_start = tile * BLOCK_Q, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;

    const i64 first_row = (i64(batch) * num_heads + head) * rows_of_head(args);
    Real lse[ROWS];
    bool any = false;
    for (int i = 0; i < ROWS; ++i) {
        const int query = q_start + row + i * ROW_STEP;
        lse[i] = query < shape.seqlen_q
            ? static_cast<const Real*>(arrays.lse)[first_row + query] : Real(0);
        any |= has_rest(lse[i]);
    }
    if (!__syncthreads_or(any)) return;

    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int shift = shape.seqlen_k - shape.seqlen_q;
    const Element* q = head_start(arrays.q, arrays.q_stride, batch, head);
    const Element* k = head_start(
        arrays.k, arrays.k_stride, batch, head / (num_heads / shape.num_heads_kv));
    PairMask pair_mask(args, batch);
    pair_mask.set_head(head);
    ScoreMod<Real> score_mod(args);
    score_mod.set_head(args, batch, head);
    RowState rows[ROWS];

    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    for (int k_tile = tiles.first; k_tile < tiles.num_visited; ++k_tile) {
        const int k_start = k_tile * BLOCK_K;
        Real x[ROWS][KEYS] = {};
        products(x, shared, q, arrays.q_stride.token, k, arrays.k_stride.token, shape, q_start,
                 k_start);
        for (int i = 0; i < ROWS; ++i) {
            const int query = q_start + row + i * ROW_STEP;
            if (!has_rest(lse[i])) continue;
            for (int j = 0; j < KEYS; ++j) {
                const int key = k_start + lane + j * LANES;
                if (!mask.visible(query, key) || !pair_mask.visible(query, key)) continue;
                rows[i].add(score_mod.score(x[i][j], Real(query + shift - key), query, key), 1);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            const Real m = __shfl_xor_sync(0xFFFFFFFFu, rows[i].m, distance);
            rows[i].add(m, __shfl_xor_sync(0xFFFFFFFFu, rows[i].l, distance));
        }
        if constexpr (SINK) rows[i].add(sink_of<Real>(args, head), 1);
        if (lane == 0 && has_rest(lse[i]))
            static_cast<Real*>(args.lse_rests)[first_row + q_start + row + i * ROW_STEP] =
                rest_of(rows[i], lse[i]);
    }
}
