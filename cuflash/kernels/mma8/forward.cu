// Forward attention by mma.sync in steps of 8: for double, where tensor cores multiply doubles
// (sm_80, sm_90, sm_100, sm_103), and for float split into tf32 parts (precision "tf32x3", sm_80
// and newer).
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-2, Alg. 1 (arXiv:2307.08691), as sm80/forward.cu, but all in double, with the
// library's exp and log, or all in float. A block computes BLOCK_Q queries of one head and visits
// the key tiles that they see from the last to the first. P stays in registers between the
// accumulators of S and the matmul with V (mma8.cuh).
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh).
// Block: NUM_WARPS warps. SCORE_PARTS of them, of wide heads, share WARP_ROWS queries: each sums S
// over a part of head_dim's columns and has a part of O's (score_parts.cuh).
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_PARTS, BLOCKS_PER_SM,
// SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to multiples of 32, of wide
// heads 128; Arguments and the options (docs/guide/options.md). With score modifications, scale S
// stands for the score (score_mod.cuh).
// Shared memory, in elements:
//     q  BLOCK_Q * (HEAD_DIM + 4)     k  BLOCK_K * (HEAD_DIM + 4)
//     v  BLOCK_K * (HEAD_DIM_V + VALUES_PAD), which is 2 for double and 4 for float
//     parts  SCORE_PARTS * BLOCK_Q * BLOCK_K, if more than 1
// The next K loads while this V is used, and V loads while K is used: two barriers per iteration.
//
// Bound by the matmuls; exp takes some 30 instructions an element of S in double, which has
// HEAD_DIM + HEAD_DIM_V multiply-adds; splitting a float takes three per operand. Bad at:
// head_dim_v of 129 to 256, for which acc is too large; wide heads, all of whose warps compute exp
// of the same scores; NaN or infinity in V in a partly masked
// tile.
#include "mma8/score_parts.cuh"
#include "mma8/visible_pairs.cuh"
#include "common/forward_loads.cuh"
#include "score/dropout.cuh"
#include "common/online_softmax.cuh"
#include "common/query_tile.cuh"
#include "score/head_options.cuh"
#include "score/max_score.cuh"
#include "common/packed_sequences.cuh"

constexpr int WARPS_DOWN = NUM_WARPS / SCORE_PARTS;         // along the queries
constexpr int WARP_ROWS = BLOCK_Q / WARPS_DOWN, WARP_COLUMNS = HEAD_DIM_V / SCORE_PARTS;
constexpr int M_TILES = WARP_ROWS / 16, S_TILES = BLOCK_K / 8, O_TILES = WARP_COLUMNS / 8;

static_assert(BLOCK_Q % (WARPS_DOWN * 16) == 0, "a warp needs whole 16-row tiles of queries");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

// The warp's part of the sums of scores, its first row of the tile and first column of O.
__device__ __forceinline__ int warp_part() {
    return SCORE_PARTS == 1 ? 0 : threadIdx.x / 32 / WARPS_DOWN;
}
__device__ __forceinline__ int warp_down() {
    return SCORE_PARTS == 1 ? threadIdx.x / 32 : threadIdx.x / 32 % WARPS_DOWN;
}
__device__ __forceinline__ int warp_column() { return warp_part() * WARP_COLUMNS; }

struct SharedPlan : ScoreParts<SCORE_PARTS, WARPS_DOWN, M_TILES, S_TILES> {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V, VALUES_PAD> v;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// m: the row's maximum of scores. l: this lane's part of the row's sum of P.
struct Rows { Element m[M_TILES][2], l[M_TILES][2]; };
using Scores = Fragments<M_TILES, S_TILES>;
using Output = Fragments<M_TILES, O_TILES>;

// softmax.cuh's, in double.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return b > a ? b : a; }
__device__ __forceinline__ double quad_max(double x) {
    x = larger(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return larger(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

__device__ __forceinline__ void reset(Rows& rows) {
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.m[i][half] = -infinity();
            rows.l[i][half] = 0;
        }
}

// Of double some 30 instructions.
struct Exp : NaturalExp<Element> {
    static constexpr bool IS_SLOW = true;
    __device__ __forceinline__ Element operator()(Element x, Element reference) const {
        return exponential(x - reference);
    }
};

// The step of online_softmax.cuh: x, the scores, becomes P.
__device__ __forceinline__ void softmax_step(Scores& x, Rows& rows, Output& acc) {
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            Element m = -infinity();
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                m = larger(larger(m, x[i][j][half * 2]), x[i][j][half * 2 + 1]);
            m = larger(rows.m[i][half], quad_max(m));
            const Element reference[1] = {raise_max(
                Exp{}, rows.m[i][half], rows.l[i][half], m,
                [&](Element factor) { rescale_row(acc[i], half, factor); })};
            weigh<S_TILES * 2>(
                Exp{}, reference, one(rows.l[i][half]),
                [&](int j) -> Element& { return x[i][j / 2][half * 2 + j % 2]; });
        }
}

// S becomes the scores of score_mod.cuh, -inf where the query does not see the key.
template <bool MASKED>
__device__ __forceinline__ void apply_score_mod_and_mask(
    Scores& s, const ScoreMod<Element>& score_mod, const LaneVisibility& visible) {
    const Shape& shape = visible.shape;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < S_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int row = i * 16 + x / 2 * 8;
                const int column = j * 8 + threadIdx.x % 4 * 2 + x % 2;
                const int query = visible.first_query + row, key = visible.k_start + column;
                s[i][j][x] = score_mod.score(
                    s[i][j][x],
                    static_cast<Element>(query + (shape.seqlen_k - shape.seqlen_q) - key), query,
                    key);
                if (MASKED && !visible(row, column)) s[i][j][x] = -infinity();
            }
}

// S of a tile, modified and masked. With parts, add_scores() does that, after a barrier.
template <bool MASKED>
__device__ __forceinline__ void compute_scores(
    Scores& s, SharedPlan& shared, int warp_row, const ScoreMod<Element>& score_mod,
    const LaneVisibility& visible) {
    gemm_abt<SCORE_PARTS>(s, shared.q, warp_row, shared.k, 0, warp_part());
    if constexpr (SCORE_PARTS > 1) shared.store_part(warp_part(), warp_down(), s);
    else apply_score_mod_and_mask<MASKED>(s, score_mod, visible);
}
template <bool MASKED>
__device__ __forceinline__ void add_scores(
    Scores& s, const SharedPlan& shared, const ScoreMod<Element>& score_mod,
    const LaneVisibility& visible) {
    if constexpr (SCORE_PARTS == 1) return;
    shared.add_parts(warp_down(), s);
    apply_score_mod_and_mask<MASKED>(s, score_mod, visible);
}

// O = acc / l and lse = m + log(l); 0 and -inf for rows without a visible key. A sink takes part
// in l.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord coord, int first_query, const Output& acc,
    const Rows& state) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Strides os = arrays.out_stride;
    const int t = threadIdx.x % 4;
    const bool aligned = rows_aligned(arrays.out, os);
    Element* out = static_cast<Element*>(arrays.out)
                 + coord.batch * os.batch + coord.head * os.head;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + i * 16 + half * 8;
            Element m = state.m[i][half], l = quad_sum(state.l[i][half]);
            if (query >= shape.seqlen_q) continue;
            if (MAX_SCORE && t == 0 && warp_part() == 0)
                store_max_score(args, index_of_query(args, coord.batch, coord.head, query), m,
                                Element(1), l);
            Element rescale = 1;
            if constexpr (SINK) {
                const WithSink<Element> row_with_sink(m, l, sink_of<Element>(args, coord.head));
                m = row_with_sink.top;
                l = row_with_sink.sum;
                rescale = row_with_sink.rescale;
            }
            const Element divisor = l == 0 ? 1 : l;
            #pragma unroll
            for (int n = 0; n < O_TILES; n += CHUNK)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    Element numbers[CHUNK];
                    chunk_of_tiles(numbers, acc[i], n, half * 2 + c);
                    #pragma unroll
                    for (int x = 0; x < CHUNK; ++x)
                        numbers[x] = (SINK ? numbers[x] * rescale : numbers[x]) / divisor;
                    store_chunk(out + query * os.token,
                                warp_column() + n * 8 + CHUNK * (2 * t + c), shape.head_dim_v,
                                aligned, numbers);
                }
            if (arrays.lse != nullptr && t == 0 && warp_part() == 0) {
                const i64 head = static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head;
                static_cast<Element*>(arrays.lse)[head * rows_of_head(args) + query] =
                    lse_of_row(m, l);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_mma8(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the tile; start loading Q and the last K.
    const Shape& call_shape = arrays_of(call_args).shape;
    Mask<CAUSAL, WINDOW> mask{
        call_shape.seqlen_q, call_shape.seqlen_k, window_of<WINDOW>(call_args)};
    TileCoord coord = query_tile_of_block<false>(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    if constexpr (PACKED) mask = {shape.seqlen_q, shape.seqlen_k, mask.window};
    const int q_start = coord.tile * BLOCK_Q;
    const int kv_head = coord.head / (shape.num_heads_q / shape.num_heads_kv);
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);

    const int warp_row = warp_down() * WARP_ROWS;
    const int first_query = q_start + warp_row + threadIdx.x % 32 / 4;
    HeadOptions<Element> options(args, coord.batch);
    options.set_head(args, coord.batch, coord.head);
    const PairMask& pair_mask = options.pair_mask;

    Rows rows;
    Output acc;
    set_zero<M_TILES, O_TILES>(acc);
    reset(rows);

    const i64 k_step = arrays.k_stride.token, v_step = arrays.v_stride.token;
    const Element* k = head_start(arrays.k, arrays.k_stride, coord.batch, kv_head);
    const Element* v = head_start(arrays.v, arrays.v_stride, coord.batch, kv_head);
    const KeyLoader<SharedPlan> loader{shared, shape, k, v, k_step, v_step};
    const auto before = [&](int tile) {                     // the visited tile before `tile`
        return pair_mask.key_tile_before(coord.tile, tile, tiles.first);
    };
    int tile = SKIPS_TILES ? before(tiles.num_visited) : tiles.num_visited - 1, next = 0;
    if (tile >= tiles.first) {
        load_queries(shared, arrays, coord.batch, coord.head, q_start);
        loader.load_k(tile);
    }

    // Main loop, one key tile per iteration. The load of its K has been started; V's tile is free
    // once all warps are past the first barrier, K's once they are past the second.
    const auto iterate = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        const int k_start = tile * BLOCK_K;
        const LaneVisibility visible{mask, pair_mask, shape, first_query, k_start};
        Scores s;
        cp_async_wait<0>();
        __syncthreads();
        loader.load_v(tile);
        compute_scores<MASKED>(s, shared, warp_row, options.score_mod, visible);
        cp_async_wait<0>();
        bool nonfinite = false;
        if constexpr (MASKED) nonfinite = __syncthreads_or(loaded_nonfinite(shared.v));
        else __syncthreads();
        next = before(tile);
        if (next >= tiles.first) loader.load_k(next);
        add_scores<MASKED>(s, shared, options.score_mod, visible);
        softmax_step(s, rows, acc);
        if constexpr (DROPOUT)
            apply_dropout(s, options.dropout, first_query, k_start + threadIdx.x % 4 * 2);
        if (MASKED && nonfinite) add_visible_rows(acc, s, shared.v, visible, warp_column());
        else gemm_ab(acc, s, shared.v, warp_column());
    };

    if constexpr (WINDOW || PAIRWISE) {                     // any tile may be partly masked
        for (; tile >= tiles.first; tile = next)
            if (tiles.full(tile) && pair_mask.sees_all(coord.tile, tile)) iterate(Bool<false>{});
            else iterate(Bool<true>{});
    } else {
        for (; tile >= tiles.num_full; --tile) iterate(Bool<true>{});
        for (; tile >= 0; --tile) iterate(Bool<false>{});
    }

    // Epilogue.
    store(args, coord, first_query, acc, rows);
}
