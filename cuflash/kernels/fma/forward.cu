// Forward attention for float, in full precision: fused multiply-adds on register tiles.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-2, Alg. 1 (arXiv:2307.08691), as sm80/forward.cu: one block computes BLOCK_Q
// queries of one head and walks the key tiles that they see from the last to the first. A warp has
// whole rows of S: their maxima take three shuffles, and its weights P change hands between its
// lanes alone, WEIGHT_KEYS columns at a time, through shared memory of its own.
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh).
// Block: NUM_WARPS warps of WARP_ROWS queries each; fma.cuh says which lane has which numbers.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM
// and HEAD_DIM_V, the head dimensions rounded up to multiples of 32; NEGATE_SCORES, whether
// scale < 0 and scores are LINEAR; WEIGHT_KEYS; Arguments and the options (docs/masks.md).
// Shared memory, in floats:
//     q   BLOCK_Q * (HEAD_DIM + 4)             k   BLOCK_K * (HEAD_DIM + 4)
//     p   BLOCK_Q * (WEIGHT_KEYS + 8)          v   BLOCK_K * (HEAD_DIM_V + 4)
// K of the next step is under way while V of this one is used, and V while K is: two barriers a
// step.
//
// Bound by the multiply-adds: of 16 instructions one or two are loads, and the softmax takes 6 an
// element of S, which has HEAD_DIM + HEAD_DIM_V multiply-adds. Bad at: head_dim_v above 128, where
// acc leaves registers for 4 rows a lane only; few queries with many keys.
#include "fma/fma.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "common/scheduler.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"

constexpr int WARP_ROWS = BLOCK_Q / NUM_WARPS;
constexpr int ROWS = WARP_ROWS / LANE_ROWS, KEYS = BLOCK_K / LANE_COLUMNS;
constexpr int COLUMNS = HEAD_DIM_V / LANE_COLUMNS;

static_assert(BLOCK_Q % (NUM_WARPS * LANE_ROWS) == 0, "every lane has as many rows");
static_assert(BLOCK_K % WEIGHT_KEYS == 0, "weights change hands so many at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    WeightTile<BLOCK_Q, WEIGHT_KEYS> p;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Scores are kept as products S, which `c` scales in the exponent, if they are LINEAR; else as what
// score_mod.cuh makes of them, and c is log2(e).

// m: the row's maximum of scores. l: this lane's share of the row's sum of P.
struct Rows { float m[ROWS], l[ROWS]; };
using Scores = float[ROWS][KEYS];
using Output = float[ROWS][COLUMNS];

// The maximum, which skips NaN, and the sum over the eight lanes of a row, in each of them.
__device__ __forceinline__ float row_max(float x) {
    #pragma unroll
    for (int distance = 2; distance < 16; distance *= 2)
        x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}
__device__ __forceinline__ float row_sum(float x) {
    #pragma unroll
    for (int distance = 2; distance < 16; distance *= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// m = max(m_old, rowmax(S)),  P = 2^(c S - c m),  l = l 2^(c m_old - c m) + rowsum(P),  and acc by
// the same factor (FlashAttention-2, Alg. 1, lines 9 and 10). S becomes P. No barrier inside.
__device__ __forceinline__ void softmax_step(Scores& s, Rows& rows, Output& acc, float c) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float m = s[i][0];
        #pragma unroll
        for (int j = 1; j < KEYS; ++j) m = fmaxf(m, s[i][j]);
        m = fmaxf(rows.m[i], row_max(m));
        const float reference = finite_reference(m, c);
        const float rescale = exp2_of_product(rows.m[i], c, reference);
        rows.m[i] = m;
        rows.l[i] *= rescale;
        #pragma unroll
        for (int n = 0; n < COLUMNS; ++n) acc[i][n] *= rescale;
        float sum = 0.0f;                                   // see sm90/forward.cu
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            s[i][j] = exp2_of_product(s[i][j], c, reference);
            sum += s[i][j];
        }
        rows.l[i] += sum;
    }
}

// The scores of products; see ScoreMod. The lane's first are of that query and that key.
__device__ __forceinline__ void apply_steps(
    Scores& s, const ScoreMod<float>& score_mod, int first_query, int first_key, int shift) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int query = first_query + i * LANE_ROWS;
        const float distance = static_cast<float>(query + shift - first_key);
        #pragma unroll
        for (int j = 0; j < KEYS; ++j)
            s[i][j] = score_mod.score(s[i][j], distance - static_cast<float>(j * LANE_COLUMNS),
                                  score_mod.bias_of(query, first_key + j * LANE_COLUMNS));
    }
}

// P = 0 where dropout drops the pair, and the others larger.
__device__ __forceinline__ void apply_dropout(
    Scores& p, const Dropout<float>& dropout, int warp_query, int k_start) {
    Kept<ROWS, KEYS> kept;
    find_kept(kept, dropout, warp_query, k_start);
    #pragma unroll
    for (int i = 0; i < ROWS; ++i)
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) p[i][j] *= kept.at(i, j) ? dropout.factor : 0.0f;
}

// O = acc / l and lse = |scale| m + log(l); rows that saw no key: 0 and -inf. A sink takes part in
// l.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord where, int first_query, Output& acc, const Rows& state) {
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const Strides os = arguments.out_stride;
    const bool aligned = rows_aligned(arguments.out, os);
    float* out = static_cast<float*>(arguments.out) + where.batch * os.batch + where.head * os.head;
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int query = first_query + i * LANE_ROWS;
        float m = state.m[i], l = row_sum(state.l[i]), rescale = 1.0f;
        if (query >= shape.seqlen_q) continue;
        if constexpr (SINK) {
            const float scale = LINEAR ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
            const WithSink<float> row_with_sink(
                m == -infinity() ? m : m * scale, l, sink_of<float>(args, where.head));
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
        if (arguments.lse != nullptr && lane_column() == 0) {
            const float scale = LINEAR && !SINK ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
            const i64 head = static_cast<i64>(where.batch) * shape.num_heads_q + where.head;
            static_cast<float*>(arguments.lse)[head * rows_of_head(args) + query] =
                lse_of_row(m * scale, l);
        }
    }
}

// The block's tile; the last tiles, which see the most keys, come first. Computed at the start and
// again at the end: that costs a few divisions and saves registers in between.
__device__ __forceinline__ TileCoord tile_of_this_block(const Arguments& args) {
    const Shape& shape = arrays_of(args).shape;
    const int num_tiles = num_query_tiles(args, BLOCK_Q);
    TileCoord where = tile_of_block(
        opaque(blockIdx.x), num_tiles, shape.num_heads_q, shape.batch, arrays_of(args).schedule);
    where.tile = num_tiles - 1 - where.tile;
    return where;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_fma(const __grid_constant__ Arguments whole) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: which tile; the first Q and K are on their way.
    const Shape& grid = arrays_of(whole).shape;
    Mask<CAUSAL, WINDOW> mask{grid.seqlen_q, grid.seqlen_k, window_of<WINDOW>(whole)};
    TileCoord where = tile_of_this_block(whole);
    const auto sequence = sequence_of_block<false>(whole, where.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = of_sequence(whole, sequence, BLOCK_Q);
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;                   // of PACKED ones the block's own
    if constexpr (PACKED) mask = {shape.seqlen_q, shape.seqlen_k, mask.window};
    ScoreMod<float> score_mod(args);
    score_mod.set_head(args, where.batch, where.head);
    PairMask pair_mask(args, where.batch);
    pair_mask.set_head(where.head);
    Dropout<float> dropout(args);
    dropout.set_head(where.batch, where.head);
    const int q_start = where.tile * BLOCK_Q;
    const int kv_head = where.head / (shape.num_heads_q / shape.num_heads_kv);
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);

    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    const int first_query = q_start + warp_row + lane_row();    // the lane's
    const float scale = fabsf(static_cast<float>(arguments.scale));
    // Never 0: 0 * inf is NaN.
    const float c = LINEAR ? fmaxf(scale * LOG2_E, 1.2e-38f) : LOG2_E;

    Rows rows;
    Output acc;
    set_zero(acc);
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        rows.m[i] = -infinity();
        rows.l[i] = 0.0f;
    }

    const i64 k_step = arguments.k_stride.token, v_step = arguments.v_stride.token;
    const float* k = head_start(arguments.k, arguments.k_stride, where.batch, kv_head);
    const float* v = head_start(arguments.v, arguments.v_stride, where.batch, kv_head);
    const auto load_k = [&](int tile) {
        const int start = tile * BLOCK_K;
        load_tile(shared.k, k + start * k_step, k_step, shape.seqlen_k - start, shape.head_dim);
        cp_async_commit();
    };
    const auto load_v = [&](int tile) {
        const int start = tile * BLOCK_K;
        load_tile(shared.v, v + start * v_step, v_step, shape.seqlen_k - start, shape.head_dim_v);
        cp_async_commit();
    };

    int tile = tiles.num_visited - 1, next = 0;
    if (SEGMENTS) tile = pair_mask.key_tile_before(where.tile, tiles.num_visited, tiles.first);
    if (tile >= tiles.first) {
        const i64 step = arguments.q_stride.token;
        const float* q = head_start(arguments.q, arguments.q_stride, where.batch, where.head);
        load_tile(shared.q, q + q_start * step, step, shape.seqlen_q - q_start, shape.head_dim);
        load_k(tile);
    }

    // One key tile: S, softmax, acc. At its start K of this tile is on its way, and V's place is
    // free once all warps are past the first barrier; K's place is free past the second.
    const auto step = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        const int k_start = tile * BLOCK_K;
        const auto visible = [&](int i, int j) {
            const int query = first_query + i * LANE_ROWS, key = k_start + j;
            if (WINDOW && key < mask.first_key(query)) return false;
            if constexpr (PAIRWISE)
                if (query < shape.seqlen_q && key < shape.seqlen_k && !pair_mask.visible(query, key))
                    return false;
            return key < mask.num_keys(query);
        };
        Scores s;
        cp_async_wait<0>();
        __syncthreads();
        load_v(tile);
        row_products(s, shared.q, warp_row, shared.k, 0);
        if constexpr (!LINEAR)
            apply_steps(s, score_mod, first_query, k_start + lane_column(),
                        shape.seqlen_k - shape.seqlen_q);
        #pragma unroll
        for (int i = 0; i < ROWS; ++i)
            #pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                if (NEGATE_SCORES) s[i][j] = -s[i][j];
                if (MASKED && !visible(i, lane_column() + j * LANE_COLUMNS)) s[i][j] = -infinity();
            }
        cp_async_wait<0>();
        const bool nonfinite = barrier_or_nonfinite<MASKED>(shared.v);
        next = pair_mask.key_tile_before(q_start / BLOCK_Q, tile, tiles.first);
        if (SEGMENTS ? next >= tiles.first : tile > tiles.first) load_k(next);
        softmax_step(s, rows, acc, c);
        if constexpr (DROPOUT) apply_dropout(s, dropout, q_start + warp_row, k_start);
        #pragma unroll
        for (int first = 0; first < BLOCK_K; first += WEIGHT_KEYS) {
            __syncwarp();                                   // the weights before are done with
            float p[ROWS][WEIGHT_KEYS / LANE_COLUMNS];
            #pragma unroll
            for (int i = 0; i < ROWS; ++i)
                #pragma unroll
                for (int j = 0; j < WEIGHT_KEYS / LANE_COLUMNS; ++j)
                    p[i][j] = s[i][first / LANE_COLUMNS + j];
            write_weights(shared.p.at, warp_row, 0, p);
            __syncwarp();
            add_weighted_rows<MASKED, WEIGHT_KEYS>(
                acc, shared.p.at + warp_row, shared.v, first, 0, visible, nonfinite);
        }
    };

    if constexpr (WINDOW || PAIRWISE) {                     // cut anywhere
        for (; tile >= tiles.first; tile = next)
            if (tiles.full(tile) && pair_mask.sees_all(q_start / BLOCK_Q, tile)) step(Bool<false>{});
            else step(Bool<true>{});
    } else {
        for (; tile >= tiles.num_full; --tile) step(Bool<true>{});
        for (; tile >= 0; --tile) step(Bool<false>{});
    }

    where = tile_of_this_block(whole);
    const auto same = sequence_of_block<false>(whole, where.tile, BLOCK_Q, true);
    const Arguments& again = of_sequence(whole, same, BLOCK_Q);
    store(again, where, where.tile * BLOCK_Q + warp_row + lane_row(), acc, rows);
}
