// Forward attention for float and its derivative along directions, in full precision: fused
// multiply-adds on register tiles.
//
//     S = Q K^T,  W = scale (Q' K^T + Q K'^T),  P = exp(scale S - lse),  b = rowsum(P * W) = lse'
//     O = P V,  O' = (P * W) V + P V' - b O
//
// As fma/forward.cu, with the tangents' tiles beside those of Q, K and V: each fragment is loaded
// once for both of its products. With a reference r of W in its row (score/row_reference.cuh), the
// sums b = rowsum(P * (W - r)) and acc_dot = (P * (W - r)) V + P V' are rescaled as l and acc are.
// A sink adds its weight times s' - r to b; dropout's Z multiplies P where it meets V or V', but
// not in b. A block has DIRECTIONS of the directions, for which it computes S, P and O once
// (score/directions.cuh). The block of the first direction stores O and lse.
//
// Grid: the tiles of fma/forward.cu, longest first, each once for every group of directions:
// blockIdx.x = order of the tile * groups + group. Block: as fma/forward.cu.
//
// Constants: those of fma/forward.cu and score/directions.cuh; Q_DOT to MOD_DOT:
// what moves. With score modifications, scale S stands for the score, W for its tangent
// (score/tangents.cuh).
// Shared memory, in floats:
//     q, q_dot  BLOCK_Q * (HEAD_DIM + 4) each          k, k_dot  BLOCK_K * (HEAD_DIM + 4) each
//     p, p_dot  BLOCK_Q * (WEIGHT_KEYS + 8) each       v, v_dot  BLOCK_K * (HEAD_DIM_V + 4) each
// with a *_dot for each direction.
// The next K and K' load while V and V' are used, and the other way round: two barriers per
// iteration.
//
// Bound by the multiply-adds: with 4 x 8 numbers of S and of W per lane, 24 loads of 16 bytes are
// 384 multiply-adds, as in fma/forward.cu. Two directions are five
// products for each load of Q, K, P and V instead of three, and half again as many numbers per
// lane. Bad at: few queries with many keys.
#include "fma/jvp_loads.cuh"
#include "fma/query_rows.cuh"
#include "fma/tangents.cuh"
#include "common/query_tile.cuh"
#include "score/directions.cuh"
#include "score/head_options.cuh"
#include "score/row_reference.cuh"
#include "common/packed_sequences.cuh"

static_assert(!READS_OUT, "every block computes O");

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot[DIRECTIONS];
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot[DIRECTIONS];
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot[DIRECTIONS];
    WeightTile<BLOCK_Q, WEIGHT_KEYS> p, p_dot[DIRECTIONS];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// W, then P * (W - r), and O' in each of the block's directions.
using ScoreTangents = float[DIRECTIONS][ROWS][KEYS];
using OutputTangents = float[DIRECTIONS][ROWS][COLUMNS];

// m: the row's maximum of scores. l, b: this lane's parts of the row's sums of P, of P * (W - r).
struct Rows { float m[ROWS], l[ROWS], b[DIRECTIONS][ROWS]; };

// r of a row of the block in a direction, 0 before the row's first key. It stands in the padding of
// the tile of P * (W - r), for lack of registers; only the row's warp reads and writes it.
__device__ __forceinline__ float& reference_of(SharedPlan& shared, int direction, int row) {
    return shared.p_dot[direction].at[row][WEIGHT_KEYS];
}

// Whole warp; first_row: the lane's first one.
__device__ __forceinline__ void reset(Rows& rows, SharedPlan& shared, int first_row) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        rows.m[i] = -infinity();
        rows.l[i] = 0.0f;
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            rows.b[v][i] = 0.0f;
            if (lane_column() == 0) reference_of(shared, v, first_row + i * LANE_ROWS) = 0.0f;
        }
    }
    __syncwarp();
}

// The products S become scores and W their tangents. Where the query does not see the key, the
// score is -inf and its tangent 0. LINEAR scores are kept as S, -S if scale < 0, as in
// fma/forward.cu. The lane's first pair is of first_query and first_key.
template <bool MASKED>
__device__ __forceinline__ void apply_options(
    Scores& s, ScoreTangents& w, const ScoreMod<float>& score_mod,
    const HeadTangent<float>& tangent, const LaneVisibility& visible, int first_key,
    int shift) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int query = visible.first_query + i * LANE_ROWS;
        const float distance = static_cast<float>(query + shift - first_key);
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int key = first_key + j * LANE_COLUMNS;
            Derivatives<float> derivatives;
            if constexpr (LINEAR) {
                if (NEGATE_SCORES) s[i][j] = -s[i][j];
            } else {
                s[i][j] = score_mod.score(
                    s[i][j], distance - static_cast<float>(j * LANE_COLUMNS), query, key,
                    derivatives);
            }
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                w[v][i][j] = tangent.of(
                    score_mod, derivatives, w[v][i][j] * score_mod.scale, query, key, v);
            if (MASKED && !visible(i, lane_column() + j * LANE_COLUMNS)) {
                s[i][j] = -infinity();
                #pragma unroll
                for (int v = 0; v < DIRECTIONS; ++v) w[v][i][j] = 0.0f;
            }
        }
    }
}

// The step of online_softmax.cuh, with b and acc_dot by acc's factors: S becomes P. begins: the
// rows that see their first keys in this tile. No barrier inside.
__device__ __forceinline__ void softmax_step(
    Scores& s, Rows& rows, bool (&begins)[ROWS], Output& acc, OutputTangents& acc_dot,
    float scale_log2) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) begins[i] = rows.m[i] == -infinity();
    softmax_step(s, rows.m, rows.l, scale_log2, [&](int i, float factor) {
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) rows.b[v][i] *= factor;
        #pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            acc[i][n] *= factor;
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) acc_dot[v][i][n] *= factor;
        }
    });
}

// r of the rows that begin: the mean of W, by weight, over the tile. Their l sums this tile alone.
// Whole warp; first_row: the lane's first one.
__device__ __forceinline__ void set_references(
    SharedPlan& shared, int first_row, const Rows& rows, const bool (&begins)[ROWS],
    const Scores& p, const ScoreTangents& w) {
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const float l = row_sum(rows.l[i]);
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            float sum = 0.0f;
            #pragma unroll
            for (int j = 0; j < KEYS; ++j) sum = fmaf(p[i][j], w[v][i][j], sum);
            const float mean = row_sum(sum) / l;
            if (begins[i] && lane_column() == 0 && is_reference(mean))
                reference_of(shared, v, first_row + i * LANE_ROWS) = mean;
        }
    }
    __syncwarp();
}

// W becomes P * (W - r), and b += rowsum(P * (W - r)). Whole warp; no barrier inside.
__device__ __forceinline__ void weigh_tangents(
    ScoreTangents& w, const Scores& p, Rows& rows, const bool (&begins)[ROWS],
    SharedPlan& shared) {
    // The lane's first row, computed anew to hold no register in between.
    const int first_row = opaque(threadIdx.x) / 32 * WARP_ROWS + lane_row();
    bool any = false;
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) any |= begins[i];
    if (__ballot_sync(WHOLE_WARP, any) != 0) set_references(shared, first_row, rows, begins, p, w);
    #pragma unroll
    for (int i = 0; i < ROWS; ++i)
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            const float r = reference_of(shared, v, first_row + i * LANE_ROWS);
            float sum = 0.0f;
            #pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                w[v][i][j] = p[i][j] * (w[v][i][j] - r);
                sum += w[v][i][j];
            }
            rows.b[v][i] += sum;
        }
}

// P = P Z and P * (W - r) by the same factors: 0 where dropout drops the pair, larger elsewhere.
__device__ __forceinline__ void apply_dropout(
    Scores& p, ScoreTangents& pw, const Dropout<float>& dropout, int warp_query, int k_start) {
    Kept<ROWS, KEYS> kept;
    find_kept(kept, dropout, warp_query, k_start);
    apply_dropout(p, kept, dropout);
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v) apply_dropout(pw[v], kept, dropout);
}

// acc += P V,  acc_dot += pw V + P V', pw = P * (W - r). The warp exchanges P and pw through shared
// memory, WEIGHT_KEYS columns at a time. visible(i, j): whether the lane's row i sees the key j.
template <bool MASKED, class F>
__device__ __forceinline__ void accumulate(
    Output& acc, OutputTangents& acc_dot, const Scores& p, const ScoreTangents& pw,
    SharedPlan& shared, int warp_row, F visible, bool nonfinite) {
    constexpr int STEP = WEIGHT_KEYS / LANE_COLUMNS;
    #pragma unroll
    for (int first = 0; first < KEYS; first += STEP) {
        float part[ROWS][STEP], part_dot[DIRECTIONS][ROWS][STEP];
        #pragma unroll
        for (int i = 0; i < ROWS; ++i)
            #pragma unroll
            for (int j = 0; j < STEP; ++j) {
                part[i][j] = p[i][first + j];
                #pragma unroll
                for (int v = 0; v < DIRECTIONS; ++v) part_dot[v][i][j] = pw[v][i][first + j];
            }
        __syncwarp();                                       // the last weights are free
        write_weights(shared.p.at, warp_row, 0, part);
        if constexpr (SCORES_MOVE)
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                write_weights(shared.p_dot[v].at, warp_row, 0, part_dot[v]);
        __syncwarp();
        gemm_ab_tangents<SCORES_MOVE, V_DOT, MASKED>(
            acc, acc_dot, shared.p, shared.p_dot, warp_row, shared.v, shared.v_dot,
            first * LANE_COLUMNS, visible, nonfinite);
    }
}

// Which results are stored; with PACKED only the call's own arguments tell.
struct Wanted { bool out, out_dot; };

// O = acc / l, lse = |scale| m + log(l), O' = acc_dot / l - (b / l) O and lse' = r + b / l. Rows
// without a visible key: lse -inf and the others 0. A sink takes part in l and b. Directions count
// from `direction` on.
__device__ __forceinline__ void store(
    const Arguments& args, SharedPlan& shared, Wanted wanted, TileCoord coord, int direction,
    int first_query, const Output& acc, const OutputTangents& acc_dot, const Rows& state) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Strides os = arrays.out_stride;
    const DirectionStrides& ods = args.tangents.out_dot;
    const Strides moved_stride = {ods.batch, ods.token, ods.head};
    float* out = static_cast<float*>(arrays.out) + coord.batch * os.batch + coord.head * os.head;
    float* out_dot = static_cast<float*>(args.out_dot) + direction * ods.direction
                   + coord.batch * ods.batch + coord.head * ods.head;
    const bool aligned = rows_aligned(out, os), dot_aligned = rows_aligned(out_dot, moved_stride);
    const i64 head = static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head;
    const i64 rows = rows_of_head(args), heads = static_cast<i64>(shape.batch) * shape.num_heads_q;
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int query = first_query + i * LANE_ROWS;
        float l = row_sum(state.l[i]), r[DIRECTIONS], b[DIRECTIONS], rescale = 1.0f;
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            const int row = query - coord.tile * BLOCK_Q;
            r[v] = SCORES_MOVE ? reference_of(shared, v, row) : 0.0f;
            b[v] = row_sum(state.b[v][i]);
        }
        const float scale = LINEAR ? fabsf(static_cast<float>(arrays.scale)) : 1.0f;
        float m = state.m[i] == -infinity() ? state.m[i] : state.m[i] * scale;
        if (query >= shape.seqlen_q) continue;
        if constexpr (SINK) {
            const WithSink<float> with_sink(m, l, sink_of<float>(args, coord.head));
            m = with_sink.top;
            l = with_sink.sum;
            rescale = with_sink.rescale;
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                b[v] = b[v] * rescale
                     + with_sink.weight * (sink_tangent_of<float>(args, direction + v, coord.head)
                                           - r[v]);
        }
        const float divisor = l == 0.0f ? 1.0f : l;
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) b[v] /= divisor;
        #pragma unroll
        for (int n = 0; n < COLUMNS; n += CHUNK) {
            float numbers[CHUNK], moved[DIRECTIONS][CHUNK];
            #pragma unroll
            for (int c = 0; c < CHUNK; ++c) {
                numbers[c] = acc[i][n + c] * rescale / divisor;
                #pragma unroll
                for (int v = 0; v < DIRECTIONS; ++v) {
                    moved[v][c] = acc_dot[v][i][n + c] * rescale / divisor;
                    moved[v][c] = fmaf(-b[v], numbers[c], moved[v][c]);
                }
            }
            const int column = lane_column() * CHUNK + n * 8;
            if (wanted.out && direction == 0)
                store_chunk(out + query * os.token, column, shape.head_dim_v, aligned, numbers);
            if (wanted.out_dot)
                #pragma unroll
                for (int v = 0; v < DIRECTIONS; ++v)
                    store_chunk(out_dot + v * ods.direction + query * ods.token, column,
                                shape.head_dim_v, dot_aligned, moved[v]);
        }
        if (lane_column() != 0) continue;
        const i64 row = head * rows + query;
        if (arrays.lse != nullptr && direction == 0)
            static_cast<float*>(arrays.lse)[row] = lse_of_row(m, l);
        if (args.lse_dot != nullptr)
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                static_cast<float*>(args.lse_dot)[(direction + v) * heads * rows + row] =
                    r[v] + b[v];
    }
}

// The block's tile and first direction.
struct BlockCoord { TileCoord coord; int direction; };
__device__ __forceinline__ BlockCoord coord_of_this_block(const Arguments& args) {
    const int groups = num_direction_groups(args.tangents);
    return {query_tile_of_block<true>(args, groups),
            first_direction_of(opaque(blockIdx.x) % groups, args.tangents)};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
jvp_fma(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the tile; start loading Q and the last K, and their tangents.
    auto [coord, direction] = coord_of_this_block(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const Shape& shape = arrays_of(args).shape;             // with PACKED the block's sequence
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(call_args)};
    HeadOptions<float> options(args, coord.batch);
    options.set_head(args, coord.batch, coord.head);
    const HeadTangent<float> tangent(args, direction, coord.batch, coord.head);
    const PairMask& pair_mask = options.pair_mask;
    const int q_tile = coord.tile, q_start = q_tile * BLOCK_Q;
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    const int first_query = q_start + warp_row + lane_row();    // the lane's
    const float scale_log2 = exponent_scale<LINEAR>(arrays_of(args).scale);

    Rows rows;
    Output acc;
    OutputTangents acc_dot;
    set_zero(acc);
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v) set_zero(acc_dot[v]);
    reset(rows, shared, warp_row + lane_row());

    const TangentLoader<SharedPlan> loader{shared, args, direction, coord.batch, coord.head,
                                           coord.head / (shape.num_heads_q / shape.num_heads_kv)};
    int tile = tiles.num_visited - 1, next = 0;
    if (SKIPS_TILES) tile = pair_mask.key_tile_before(q_tile, tiles.num_visited, tiles.first);
    if (tile >= tiles.first) {
        loader.load_queries(q_start);
        loader.load_k(tile);
    }

    // Main loop: fma/forward.cu's, with a tangent beside each tile.
    const auto iterate = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        const int k_start = tile * BLOCK_K;
        const LaneVisibility visible{mask, pair_mask, shape, first_query, k_start};
        Scores s;
        ScoreTangents w;
        cp_async_wait<0>();
        __syncthreads();
        loader.load_v(tile);
        gemm_abt_tangents<Q_DOT, K_DOT>(
            s, w, shared.q, shared.q_dot, warp_row, shared.k, shared.k_dot, 0);
        apply_options<MASKED>(s, w, options.score_mod, tangent, visible,
                              k_start + lane_column(), shape.seqlen_k - shape.seqlen_q);
        cp_async_wait<0>();
        const bool nonfinite = barrier_or_nonfinite_all<MASKED, V_DOT>(shared.v, shared.v_dot);
        next = pair_mask.key_tile_before(q_tile, tile, tiles.first);
        if (SKIPS_TILES ? next >= tiles.first : tile > tiles.first) loader.load_k(next);
        bool begins[ROWS];
        softmax_step(s, rows, begins, acc, acc_dot, scale_log2);
        if constexpr (SCORES_MOVE) weigh_tangents(w, s, rows, begins, shared);
        if constexpr (DROPOUT) apply_dropout(s, w, options.dropout, q_start + warp_row, k_start);
        accumulate<MASKED>(acc, acc_dot, s, w, shared, warp_row, visible, nonfinite);
    };

    if constexpr (WINDOW || PAIRWISE) {                     // any tile may be partly masked
        for (; tile >= tiles.first; tile = next)
            if (tiles.full(tile) && pair_mask.sees_all(q_tile, tile)) iterate(Bool<false>{});
            else iterate(Bool<true>{});
    } else {
        for (; tile >= tiles.num_full; --tile) iterate(Bool<true>{});
        for (; tile >= 0; --tile) iterate(Bool<false>{});
    }

    // Epilogue.
    auto [same, same_direction] = coord_of_this_block(call_args);
    const auto same_sequence = sequence_of_block<false>(call_args, same.tile, BLOCK_Q, true);
    const Arguments& same_args = sequence_arguments(call_args, same_sequence, BLOCK_Q);
    const Wanted wanted{arrays_of(call_args).out != nullptr, call_args.out_dot != nullptr};
    store(same_args, shared, wanted, same, same_direction,
          same.tile * BLOCK_Q + warp_row + lane_row(), acc, acc_dot, rows);
}
