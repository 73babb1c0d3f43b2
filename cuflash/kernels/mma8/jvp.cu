// The derivative of attention along directions by mma.sync in steps of 8: for double, where tensor
// cores multiply doubles (sm_80, sm_90, sm_100, sm_103), and for float split into tf32 parts
// (precision "tf32x3", sm_80 and newer). O and lse are given; mma8/forward.cu computes them before.
//
//     S = Q K^T,  X' = scale (Q' K^T + Q K'^T),  P = exp(scale S - lse)
//     b = rowsum(P * W) = lse',  O' = (P * W) V + P V' - b O
//
// with W, the tangent of the scores, from score/tangents.cuh: X' without options. P comes from lse
// alone, as in mma8/backward.cu, so nothing is rescaled and one accumulator a row is enough: the
// sum of O' takes the registers that O takes in mma8/forward.cu. A block computes BLOCK_Q queries
// of one head in one direction and visits the key tiles that they see from the last to the first.
// A sink adds its weight times s' to b; dropout's Z multiplies P where it meets V or V', not in b.
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh), and of
// each tile all directions, which read the same K and V.
// Block: NUM_WARPS warps of WARP_ROWS queries each; twice as many as there are 16-row tiles of
// queries make two groups, which take turns at the key tiles (key_groups.cuh).
//
// Constants: those of mma8/forward.cu; Q_DOT to MOD_DOT: what moves.
// Shared memory, in elements:
//     q, q_dot  BLOCK_Q * (HEAD_DIM + 4) each     k, k_dot  BLOCK_K * (HEAD_DIM + 4) each
//     v, v_dot  BLOCK_K * (HEAD_DIM_V + VALUES_PAD) each
// With two groups k, k_dot and v, v_dot share memory, of which each group has its own.
// The loads are those of mma8/forward.cu, of two arrays at a time: two barriers per iteration, or
// four of a group.
//
// Bound by the matmuls, 5 against forward's 2: one warp a scheduler cannot keep the tensor cores
// busy, two can. Bad at: what mma8/forward.cu is bad at; several directions share no matmul.
#include "mma8/jvp_matmuls.cuh"
#include "mma8/key_groups.cuh"
#include "mma8/tangent_matmuls.cuh"
#include "mma8/visible_pairs.cuh"
#include "common/forward_loads.cuh"
#include "common/query_tile.cuh"
#include "score/head_options.cuh"
#include "score/lse_rest.cuh"
#include "score/tangents.cuh"
#include "common/packed_sequences.cuh"

constexpr int WARP_ROWS = BLOCK_Q / GROUP_WARPS;
constexpr int M_TILES = WARP_ROWS / 16, S_TILES = BLOCK_K / 8, O_TILES = HEAD_DIM_V / 8;

// Whether S and W load their operands a step of the sum ahead. Float32 at head_dim 128 takes up to
// 3 % less time, float64 at 64 up to 4 % more: two blocks fill each other's waits already.
constexpr bool LOADS_AHEAD = HEAD_DIM > 64;

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot;
    TilesOf<GROUPS> tiles[GROUPS];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// lse: the row's, as effective_lse() has it. b: this lane's part of the row's sum of P * W.
struct Rows { Element lse[M_TILES][2], b[M_TILES][2]; };
using Scores = Fragments<M_TILES, S_TILES>;
using Output = Fragments<M_TILES, O_TILES>;
static_assert(GROUPS == 1 || sizeof(SharedPlan) >= (sizeof(Output) + sizeof(Rows)) * GROUP_THREADS,
              "the groups' sums are added in shared memory");

// One head's queries of a direction, and tiles of its keys; what does not move has no tangent.
struct Loader {
    SharedPlan& shared;
    const Group& group;
    const ForwardArguments& arrays;
    const TangentNumbers& moves;
    const Element *q, *k, *v, *q_dot, *k_dot, *v_dot;

    __device__ __forceinline__ Loader(
        SharedPlan& shared, const Group& group, const Arguments& args, TileCoord coord,
        int direction)
        : shared(shared), group(group), arrays(arrays_of(args)), moves(args.tangents) {
        const int batch = coord.batch, head = coord.head;
        const int kv_head = head / (arrays.shape.num_heads_q / arrays.shape.num_heads_kv);
        q = head_start(arrays.q, arrays.q_stride, batch, head);
        k = head_start(arrays.k, arrays.k_stride, batch, kv_head);
        v = head_start(arrays.v, arrays.v_stride, batch, kv_head);
        q_dot = head_start(args.q_dot, moves.q_dot, direction, batch, head);
        k_dot = head_start(args.k_dot, moves.k_dot, direction, batch, kv_head);
        v_dot = head_start(args.v_dot, moves.v_dot, direction, batch, kv_head);
    }

    // By the whole block; joins the copies of the first keys.
    __device__ __forceinline__ void load_queries(int start) const {
        const i64 step = arrays.q_stride.token, dot_step = moves.q_dot.token;
        const int num_rows = arrays.shape.seqlen_q - start, columns = arrays.shape.head_dim;
        load_tile(shared.q, q + start * step, step, num_rows, columns);
        if constexpr (Q_DOT)
            load_tile(shared.q_dot, q_dot + start * dot_step, dot_step, num_rows, columns);
    }
    __device__ __forceinline__ void load_keys(int tile) const {
        const i64 step = arrays.k_stride.token, dot_step = moves.k_dot.token;
        const int start = tile * BLOCK_K;
        const int num_rows = arrays.shape.seqlen_k - start, columns = arrays.shape.head_dim;
        KeyTile& keys = group.tiles.keys;
        load_tile<GroupThreads>(keys.k, k + start * step, step, num_rows, columns);
        if constexpr (K_DOT)
            load_tile<GroupThreads>(
                keys.k_dot, k_dot + start * dot_step, dot_step, num_rows, columns);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_values(int tile) const {
        const i64 step = arrays.v_stride.token, dot_step = moves.v_dot.token;
        const int start = tile * BLOCK_K;
        const int num_rows = arrays.shape.seqlen_k - start, columns = arrays.shape.head_dim_v;
        ValueTile& values = group.tiles.values;
        if constexpr (SCORES_MOVE)
            load_tile<GroupThreads>(values.v, v + start * step, step, num_rows, columns);
        if constexpr (V_DOT)
            load_tile<GroupThreads>(
                values.v_dot, v_dot + start * dot_step, dot_step, num_rows, columns);
        cp_async_commit();
    }
};

// Rows past seqlen_q get the lse of rows without a key.
__device__ __forceinline__ void load_lse(
    Rows& rows, const Arguments& args, TileCoord coord, int first_query) {
    const Shape& shape = arrays_of(args).shape;
    const i64 head = static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head;
    const Element* lse =
        static_cast<const Element*>(arrays_of(args).lse) + head * rows_of_head(args);
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + i * 16 + half * 8;
            rows.lse[i][half] =
                effective_lse(query < shape.seqlen_q ? lse[query] : -Element(infinity()));
            rows.b[i][half] = 0;
        }
}

// P = exp(x - lse) and P * W replace S and W = X' / scale, both 0 for masked pairs; b += rowsum(P *
// W). With dropout both are then multiplied by Z.
template <bool MASKED>
__device__ __forceinline__ void compute_weights(
    Scores& s, Scores& w, Rows& rows, const HeadOptions<Element>& options,
    const LseRests<Element>& rests, const HeadTangent<Element>& tangent,
    const LaneVisibility& visible) {
    const ScoreMod<Element>& score_mod = options.score_mod;
    const int first_key = visible.k_start + threadIdx.x % 4 * 2;
    const int shift = visible.shape.seqlen_k - visible.shape.seqlen_q;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = i * 16 + half * 8, query = visible.first_query + row;
            const Element lse = rows.lse[i][half], rest = rests.of(query, lse);
            u32 kept = 0;
            if constexpr (DROPOUT) kept = options.dropout.kept_bits<S_TILES>(query, first_key);
            Element sum = 0;
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int key = first_key + j * 8 + x;
                    Element &p = s[i][j][half * 2 + x], &pw = w[i][j][half * 2 + x];
                    Derivatives<Element> derivatives;
                    p = score_mod.score(
                        p, static_cast<Element>(query + shift - key), query, key, derivatives);
                    const Element x_dot = score_mod.scale * pw;
                    p = exponential(p - lse - rest);
                    pw = p * tangent.of(score_mod, derivatives, x_dot, query, key);
                    if (MASKED && !visible(row, key - visible.k_start)) p = pw = 0;
                    if constexpr (SCORES_MOVE) sum += pw;
                    if constexpr (DROPOUT) {
                        const Element z = options.dropout.z_of(kept, j * 2 + x);
                        p *= z;
                        pw *= z;
                    }
                }
            rows.b[i][half] += sum;
        }
}

// acc += (P * W) V + P V'. nonfinite: whether V or V' of a partly masked tile contains a NaN or an
// infinity.
__device__ __forceinline__ void accumulate(
    Output& acc, const Scores& p, const Scores& pw, const ValueTile& values,
    const LaneVisibility& visible, bool nonfinite) {
    if constexpr (SCORES_MOVE) {
        if (nonfinite) add_visible_rows(acc, pw, values.v, visible);
        else gemm_ab(acc, pw, values.v);
    }
    if constexpr (V_DOT) {
        if (nonfinite) add_visible_rows(acc, p, values.v_dot, visible);
        else gemm_ab(acc, p, values.v_dot);
    }
}

// Whether a chunk that this thread itself loaded of V or V' holds a NaN or an infinity.
__device__ __forceinline__ bool loaded_nonfinite_values(const Group& group) {
    const ValueTile& values = group.tiles.values;
    bool found = false;
    if constexpr (SCORES_MOVE) found |= loaded_nonfinite<GroupThreads>(values.v);
    if constexpr (V_DOT) found |= loaded_nonfinite<GroupThreads>(values.v_dot);
    return found;
}

// O' = acc - b O and lse' = b. Without a key, or with scores of -inf only, both are 0.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord coord, int direction, int first_query, const Output& acc,
    const Rows& rows, const LseRests<Element>& rests) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const Strides os = arrays.out_stride;
    const DirectionStrides& ods = args.tangents.out_dot;
    const Element* out = head_start(arrays.out, os, coord.batch, coord.head);
    Element* out_dot = const_cast<Element*>(
        head_start(args.out_dot, ods, direction, coord.batch, coord.head));
    const bool aligned = rows_aligned(out_dot, Strides{0, ods.token, 0});
    const i64 heads = static_cast<i64>(shape.batch) * shape.num_heads_q;
    const i64 head =
        direction * heads + static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head;
    const Element sink = sink_of<Element>(args, coord.head);
    const Element sink_dot = sink_tangent_of<Element>(args, direction, coord.head);
    const int t = threadIdx.x % 4;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + i * 16 + half * 8;
            Element b = quad_sum(rows.b[i][half]);
            if (query >= shape.seqlen_q) continue;
            const Element lse = rows.lse[i][half];
            if constexpr (SINK_DOT) b += exponential(sink - lse - rests.of(query, lse)) * sink_dot;
            #pragma unroll
            for (int n = 0; n < O_TILES; n += CHUNK)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int column = n * 8 + CHUNK * (2 * t + c);
                    Element numbers[CHUNK];
                    chunk_of_tiles(numbers, acc[i], n, half * 2 + c);
                    #pragma unroll
                    for (int x = 0; x < CHUNK; ++x)
                        if (column + x < shape.head_dim_v)
                            numbers[x] = fma(-b, out[query * os.token + column + x], numbers[x]);
                    store_chunk(out_dot + query * ods.token, column, shape.head_dim_v, aligned,
                                numbers);
                }
            if (args.lse_dot != nullptr && t == 0)
                static_cast<Element*>(args.lse_dot)[head * rows_of_head(args) + query] = b;
        }
}

// What a warp needs to visit key tiles. first_row: of the warp, in the tile of queries.
// first_query: of the lane.
struct Visitor {
    const Loader& loader;
    const HeadOptions<Element>& options;
    const LseRests<Element>& rests;
    const HeadTangent<Element>& tangent;
    const Mask<CAUSAL, WINDOW>& mask;
    const int first_row, first_query;

    // Adds a key tile to the sums. The load of its K, K' has been started; starts that of the next,
    // if any. With one group V's tiles are free once all warps are past the first barrier, K's once
    // past the second.
    template <bool MASKED>
    __device__ __forceinline__ void visit(
        Output& acc, Rows& rows, int tile, int next, bool has_next) const {
        const Group& group = loader.group;
        const LaneVisibility visible{
            mask, options.pair_mask, loader.arrays.shape, first_query, tile * BLOCK_K};
        const KeyTile& keys = group.tiles.keys;
        Scores s, w;                                        // S, then P; W, then P * W
        cp_async_wait<0>();
        group.sync();
        if constexpr (GROUPS == 1) loader.load_values(tile);
        if constexpr (LOADS_AHEAD)
            gemm_abt_dot_ahead<Q_DOT, K_DOT>(s, w, loader.shared.q, loader.shared.q_dot, first_row,
                                             keys.k, keys.k_dot);
        else
            gemm_abt_dot<Q_DOT, K_DOT>(s, w, loader.shared.q, loader.shared.q_dot, first_row,
                                       keys.k, keys.k_dot, 0);
        if constexpr (GROUPS == 2) {
            group.sync();
            loader.load_values(tile);
            compute_weights<MASKED>(s, w, rows, options, rests, tangent, visible);
        }
        cp_async_wait<0>();
        bool nonfinite = false;
        if constexpr (MASKED) nonfinite = group.sync_or(loaded_nonfinite_values(group));
        else group.sync();
        if constexpr (GROUPS == 1) {
            if (has_next) loader.load_keys(next);
            compute_weights<MASKED>(s, w, rows, options, rests, tangent, visible);
        }
        accumulate(acc, s, w, group.tiles.values, visible, nonfinite);
        if constexpr (GROUPS == 2) {
            group.sync();
            if (has_next) loader.load_keys(next);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
jvp_mma8(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: find the tile; start loading Q, Q' and the last K, K'.
    const int directions = call_args.tangents.num_directions, direction = blockIdx.x % directions;
    TileCoord coord = query_tile_of_block<false>(call_args, directions);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const Shape& shape = arrays_of(args).shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_start = coord.tile * BLOCK_Q;
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const Group group(shared.tiles);
    const int warp_row = GroupThreads::rank() / 32 * WARP_ROWS;
    const int first_query = q_start + warp_row + threadIdx.x % 32 / 4;
    HeadOptions<Element> options(args, coord.batch);
    options.set_head(args, coord.batch, coord.head);
    const PairMask& pair_mask = options.pair_mask;
    const HeadTangent<Element> tangent(args, direction, coord.batch, coord.head);
    LseRests<Element> rests;
    rests.set_head(args, coord.batch, coord.head);

    const Loader loader(shared, group, args, coord, direction);
    const auto before = [&](int tile, int count) {          // the count-th visited before `tile`
        if constexpr (SKIPS_TILES) {
            for (; count > 0; --count)
                tile = pair_mask.key_tile_before(coord.tile, tile, tiles.first);
            return tile;
        } else {
            return tile - count;
        }
    };
    int tile = before(tiles.num_visited, 1 + group.index), next = 0;
    if (GROUPS == 2 || tile >= tiles.first) loader.load_queries(q_start);
    if (tile >= tiles.first) loader.load_keys(tile);
    Rows rows;
    Output acc;
    set_zero<M_TILES, O_TILES>(acc);
    load_lse(rows, args, coord, first_query);
    if constexpr (GROUPS == 2) {                            // each has loaded some of Q, Q'
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }

    // Main loop, one key tile per iteration.
    const Visitor visitor{loader, options, rests, tangent, mask, warp_row, first_query};
    for (; tile >= tiles.first; tile = next) {
        next = before(tile, GROUPS);
        const bool has_next = next >= tiles.first;
        if (tiles.full(tile) && pair_mask.sees_all(coord.tile, tile))
            visitor.visit<false>(acc, rows, tile, next, has_next);
        else
            visitor.visit<true>(acc, rows, tile, next, has_next);
    }

    // Epilogue.
    if constexpr (GROUPS == 2) {
        add_groups(acc, rows.b, reinterpret_cast<Element*>(&shared), group);
        if (group.index > 0) return;
    }
    store(args, coord, direction, first_query, acc, rows, rests);
}
