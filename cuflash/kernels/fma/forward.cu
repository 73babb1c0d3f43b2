// Forward attention for float, in full precision: fused multiply-adds on register tiles.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-2, Alg. 1 (arXiv:2307.08691), as sm80/forward.cu: a block computes BLOCK_Q
// queries of one head and visits the key tiles that they see from the last to the first. A warp has
// whole rows of S: their maxima take three shuffles, and its weights P are exchanged between its
// lanes only, WEIGHT_KEYS columns at a time, through the warp's own shared memory.
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh).
// Block: NUM_WARPS warps of WARP_ROWS queries each; fma.cuh defines which lane holds which numbers.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM
// and HEAD_DIM_V, the head dimensions rounded up to multiples of 32; NEGATE_SCORES, whether
// scale < 0 and scores are LINEAR; WEIGHT_KEYS; Arguments and the options (docs/guide/options.md).
// Shared memory, in floats:
//     q   BLOCK_Q * (HEAD_DIM + 4)             k   BLOCK_K * (HEAD_DIM + 4)
//     p   BLOCK_Q * (WEIGHT_KEYS + 8)          v   BLOCK_K * (HEAD_DIM_V + 4)
// The next K loads while this V is used, and V loads while K is used: two barriers per iteration.
// With a float bias and WEIGHT_KEYS = BLOCK_K, a warp's biases load into its rows of p while S is
// computed (bias_tiles.cuh).
//
// Bound by the multiply-adds: of 16 instructions one or two are loads, and the softmax takes 6 an
// element of S, which has HEAD_DIM + HEAD_DIM_V multiply-adds. Bad at: head_dim_v above 128, where
// acc leaves registers for only 4 rows per lane; few queries with many keys.
#include "fma/bias_tiles.cuh"
#include "fma/biases_ahead.cuh"
#include "fma/loads_ahead.cuh"
#include "fma/query_rows.cuh"
#include "common/forward_loads.cuh"
#include "common/query_tile.cuh"
#include "score/head_options.cuh"
#include "score/max_score.cuh"
#include "common/packed_sequences.cuh"

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    WeightTile<BLOCK_Q, WEIGHT_KEYS> p;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// LINEAR scores are kept as S, and the exponent scales them by scale_log2. Others are the scores of
// score_mod.cuh, and scale_log2 is log2(e).

// m: the row's maximum of scores. l: this lane's part of the row's sum of P.
struct Rows { float m[ROWS], l[ROWS]; };

__device__ __forceinline__ void reset(Rows& rows) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        rows.m[i] = -infinity();
        rows.l[i] = 0.0f;
    }
}

// The step of online_softmax.cuh: S becomes P. No barrier inside.
__device__ __forceinline__ void softmax_step(Scores& s, Rows& rows, Output& acc, float scale_log2) {
    softmax_step(s, rows.m, rows.l, scale_log2, [&](int i, float factor) {
        #pragma unroll
        for (int n = 0; n < COLUMNS; ++n) acc[i][n] *= factor;
    });
}

constexpr bool BIASES_IN_P = STAGES_BIASES && WEIGHT_KEYS == BLOCK_K;
using Ahead = BiasesAhead<(ROWS <= 4 && !BIASES_IN_P)>;     // with more, registers run out

// S becomes the scores of score_mod.cuh. The lane's first are of first_query and first_key. rows:
// the warp's of p.
__device__ __forceinline__ void apply_score_mod(
    Scores& s, const ScoreMod<float>& score_mod, const float (*rows)[WEIGHT_KEYS + 8],
    int first_query, int first_key, int shift) {
    const auto apply = [&](auto bias_of) {
        #pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int query = first_query + i * LANE_ROWS;
            const float distance = static_cast<float>(query + shift - first_key);
            const auto biases = bias_of(i, query);
            #pragma unroll
            for (int j = 0; j < KEYS; ++j)
                s[i][j] = score_mod.score(
                    s[i][j], biases(j * LANE_COLUMNS),
                    distance - static_cast<float>(j * LANE_COLUMNS), query,
                    first_key + j * LANE_COLUMNS);
        }
    };
    if constexpr (BIASES_IN_P)
        return apply([&](int i, int) {
            const float* row = rows[lane_row() + i * LANE_ROWS] + lane_column();
            return [=](int key) { return row[key]; };
        });
    if constexpr (BIAS && ROWS * (KEYS + COLUMNS) < 128)    // with more numbers 14 % slower
        if (score_mod.has_row(first_key + (KEYS - 1) * LANE_COLUMNS))
            return apply([&](int, int query) {
                const Bias* row = score_mod.row_of_bias(query, first_key);
                return [=](int key) { return to_accumulator(row[key]); };
            });
    apply([&](int, int query) {
        return [&score_mod, query, first_key](int key) {
            return score_mod.bias_of(query, first_key + key);
        };
    });
}

// S = -inf where the query does not see the key, and -S if scale < 0: the softmax takes |scale|.
template <bool MASKED>
__device__ __forceinline__ void apply_mask(Scores& s, const LaneVisibility& visible) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i)
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            if (NEGATE_SCORES) s[i][j] = -s[i][j];
            if (MASKED && !visible(i, lane_column() + j * LANE_COLUMNS)) s[i][j] = -infinity();
        }
}

// The scores of key tile `tile`, whose K is there; its V loads meanwhile, and is complete for the
// calling thread.
template <bool MASKED>
__device__ __forceinline__ void compute_scores(
    Scores& s, SharedPlan& shared, const KeyLoader<SharedPlan>& loader,
    const ScoreMod<float>& score_mod, const LaneVisibility& visible, int tile, int warp_row) {
    const int k_start = tile * BLOCK_K, q_start = visible.first_query - warp_row - lane_row();
    float (*const rows)[WEIGHT_KEYS + 8] = shared.p.at + warp_row;
    if constexpr (BIASES_IN_P)                              // with V; the last weights are used
        load_biases<OneWarp, WARP_ROWS, BLOCK_K>(rows, score_mod, q_start + warp_row, k_start);
    loader.load_v(tile);
    const Ahead biases(score_mod, q_start, k_start);
    gemm_abt<ROWS <= 4 ? 2 : 1>(s, shared.q, warp_row, shared.k, 0);
    if constexpr (BIASES_IN_P) {
        cp_async_wait<0>();                                 // V, and the lane's part of biases
        __syncwarp();
    }
    biases.use();
    if constexpr (!LINEAR)
        apply_score_mod(s, score_mod, rows, visible.first_query, k_start + lane_column(),
                        loader.shape.seqlen_k - loader.shape.seqlen_q);
    apply_mask<MASKED>(s, visible);
    if constexpr (!BIASES_IN_P) cp_async_wait<0>();
}

// acc += P V. The warp exchanges P through shared memory, WEIGHT_KEYS columns at a time. visible(i,
// j): whether the lane's row i sees the tile's key j.
template <bool MASKED, class F>
__device__ __forceinline__ void accumulate(
    Output& acc, const Scores& s, SharedPlan& shared, int warp_row, F visible, bool nonfinite) {
    #pragma unroll
    for (int first = 0; first < BLOCK_K; first += WEIGHT_KEYS) {
        __syncwarp();                                   // the last weights are free
        float p[ROWS][WEIGHT_KEYS / LANE_COLUMNS];
        #pragma unroll
        for (int i = 0; i < ROWS; ++i)
            #pragma unroll
            for (int j = 0; j < WEIGHT_KEYS / LANE_COLUMNS; ++j)
                p[i][j] = s[i][first / LANE_COLUMNS + j];
        write_weights(shared.p.at, warp_row, 0, p);
        __syncwarp();
        if constexpr (ROWS <= 4)                            // with more, registers run out
            gemm_ab_ahead<MASKED, WEIGHT_KEYS>(
                acc, shared.p.at + warp_row, shared.v, first, 0, visible, nonfinite);
        else
            gemm_ab<MASKED, WEIGHT_KEYS>(
                acc, shared.p.at + warp_row, shared.v, first, 0, visible, nonfinite);
    }
}

// O = acc / l and lse = |scale| m + log(l); 0 and -inf for rows without a visible key. A sink takes
// part in l.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord coord, int first_query, Output& acc, const Rows& state) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Strides os = arrays.out_stride;
    const bool aligned = rows_aligned(arrays.out, os);
    float* out = static_cast<float*>(arrays.out) + coord.batch * os.batch + coord.head * os.head;
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int query = first_query + i * LANE_ROWS;
        float m = state.m[i], l = row_sum(state.l[i]), rescale = 1.0f;
        if (query >= shape.seqlen_q) continue;
        if (MAX_SCORE && lane_column() == 0)
            store_max_score(args, index_of_query(args, coord.batch, coord.head, query), m,
                            LINEAR ? fabsf(static_cast<float>(arrays.scale)) : 1.0f, l);
        if constexpr (SINK) {
            const float scale = LINEAR ? fabsf(static_cast<float>(arrays.scale)) : 1.0f;
            const WithSink<float> row_with_sink(
                m == -infinity() ? m : m * scale, l, sink_of<float>(args, coord.head));
            m = row_with_sink.top;
            l = row_with_sink.sum;
            rescale = row_with_sink.rescale;
        }
        #pragma unroll
        for (int n = 0; n < COLUMNS; n += CHUNK) {
            float numbers[CHUNK];
            #pragma unroll
            for (int c = 0; c < CHUNK; ++c)
                numbers[c] = acc[i][n + c] * rescale / (l == 0.0f ? 1.0f : l);
            store_chunk(out + query * os.token, lane_column() * CHUNK + n * 8, shape.head_dim_v,
                        aligned, numbers);
        }
        if (arrays.lse != nullptr && lane_column() == 0) {
            const float scale = LINEAR && !SINK ? fabsf(static_cast<float>(arrays.scale)) : 1.0f;
            const i64 head = static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head;
            static_cast<float*>(arrays.lse)[head * rows_of_head(args) + query] =
                lse_of_row(m * scale, l);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_fma(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the tile; start loading Q and the last K.
    const Shape& call_shape = arrays_of(call_args).shape;
    Mask<CAUSAL, WINDOW> mask{
        call_shape.seqlen_q, call_shape.seqlen_k, window_of<WINDOW>(call_args)};
    TileCoord coord = query_tile_of_block<true>(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;                      // with PACKED the block's sequence
    if constexpr (PACKED) mask = {shape.seqlen_q, shape.seqlen_k, mask.window};
    HeadOptions<float> options(args, coord.batch);
    options.set_head(args, coord.batch, coord.head);
    const PairMask& pair_mask = options.pair_mask;
    const int q_start = coord.tile * BLOCK_Q;
    const int kv_head = coord.head / (shape.num_heads_q / shape.num_heads_kv);
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    const int first_query = q_start + warp_row + lane_row();    // the lane's
    const float scale_log2 = exponent_scale<LINEAR>(arrays.scale);

    Rows rows;
    Output acc;
    set_zero(acc);
    reset(rows);

    const i64 k_step = arrays.k_stride.token, v_step = arrays.v_stride.token;
    const float* k = head_start(arrays.k, arrays.k_stride, coord.batch, kv_head);
    const float* v = head_start(arrays.v, arrays.v_stride, coord.batch, kv_head);
    const KeyLoader<SharedPlan> loader{shared, shape, k, v, k_step, v_step};
    int tile = tiles.num_visited - 1, next = 0;
    if (SKIPS_TILES) tile = pair_mask.key_tile_before(coord.tile, tiles.num_visited, tiles.first);
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
        compute_scores<MASKED>(s, shared, loader, options.score_mod, visible, tile, warp_row);
        const bool nonfinite = barrier_or_nonfinite<MASKED>(shared.v);
        next = pair_mask.key_tile_before(q_start / BLOCK_Q, tile, tiles.first);
        if (SKIPS_TILES ? next >= tiles.first : tile > tiles.first) loader.load_k(next);
        softmax_step(s, rows, acc, scale_log2);
        if constexpr (DROPOUT) apply_dropout(s, options.dropout, q_start + warp_row, k_start);
        accumulate<MASKED>(acc, s, shared, warp_row, visible, nonfinite);
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
    coord = query_tile_of_block<true>(call_args);
    const auto same_sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    const Arguments& same_args = sequence_arguments(call_args, same_sequence, BLOCK_Q);
    store(same_args, coord, coord.tile * BLOCK_Q + warp_row + lane_row(), acc, rows);
}
