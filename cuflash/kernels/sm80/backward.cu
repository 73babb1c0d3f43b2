// Backward attention for 16-bit types by mma.sync, sm_80 and newer: dK, dV, and the sums of dQ.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691): one block computes BLOCK_K keys of one key head. It
// walks the query tiles that see them, of every query head of the group, and keeps dK and dV in
// registers. Its share of dQ it adds in float to a sum in global memory, which finish/dq.cu
// scales and rounds. delta = rowsum(dO * O) comes from prepare/delta.cu.
//
// Grid: tiles of BLOCK_K keys of all (batch, key head) pairs (scheduler.cuh), the first tiles
// first: if CAUSAL, most queries see those.
// Block: NUM_WARPS warps; backward_layout.cuh says how they share each product.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, GRADIENT_WARPS_K,
// NUM_STAGES, BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up
// to multiples of 32; PADDED, whether that changed one of them; DETERMINISTIC: the blocks of one
// head add to a query tile's dQ in the order of their key tiles; Arguments and the
// options (docs/guide/options.md): with them scale S above stands for the score that score_mod.cuh
// makes of it, and dS for the gradient by scale S. Shared memory, in bytes, columns rounded up to
// multiples of 64 (smem.cuh):
//     k           BLOCK_K * HEAD_DIM * 2                      in the end dK
//     v           BLOCK_K * HEAD_DIM_V * 2                    in the end dV
//     q           NUM_STAGES * BLOCK_Q * HEAD_DIM * 2
//     dout        NUM_STAGES * BLOCK_Q * HEAD_DIM_V * 2
//     p, ds       BLOCK_Q * BLOCK_K * 2 each                  they change hands between warps
//     lse, delta  NUM_STAGES * BLOCK_Q * 4 each
// Barriers a step: one when Q and dO have come, one when P and dS are written, and with one stage a
// third before the next load.
//
// Bad at: Hopper, whose wgmma multiplies about twice as fast; few keys with many queries (one block
// a key tile, queries are not split).
#include "sm80/backward_layout.cuh"
#include "score/dbias.cuh"
#include "score/dropout.cuh"
#include "common/head_rows.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "common/scheduler.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"
#include "common/dq_semaphore.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k;                          // dK leaves through it
    SmemTile<BLOCK_K, HEAD_DIM_V> v;                        // dV leaves through it
    SmemTile<BLOCK_Q, HEAD_DIM> q[NUM_STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[NUM_STAGES];
    SmemTile<BLOCK_Q, BLOCK_K> p, ds;
    alignas(1024) float lse[NUM_STAGES][BLOCK_Q];
    float delta[NUM_STAGES][BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "the loop below knows one or two stages");

// Columns of dQ that a warp computes at once, in tiles of 8: all of its share, or half where the
// share is more than 32 floats a thread.
constexpr int DQ_SLICE = QueryGrid::M_TILES * QueryGrid::N_TILES > 8 && QueryGrid::N_TILES % 4 == 0
                       ? QueryGrid::N_TILES / 2 : QueryGrid::N_TILES;

using Scores = ScoreGrid::Fragments;
using ScoreRows = OperandA<BLOCK_Q, Stored::AS_NAMED, ScoreGrid::M_TILES>;
using ScoreColumns = OperandB<BLOCK_K, Stored::TRANSPOSED, ScoreGrid::N_TILES / 2>;
using PackedScores = Packed<ScoreGrid::M_TILES, ScoreGrid::N_TILES>;

// Where a tile of pairs lies, and how its scores are made.
struct TilePair {
    Mask<CAUSAL, WINDOW> mask;
    int q_start, k_start;
    float scale;
    ScoreMod<float> steps;
    Pairs pairs;
    Dropout<float> dropout;
    BiasGradient dbias;

    template <class Arguments>
    __device__ __forceinline__ void set_head(const Arguments& args, int batch, int head) {
        steps.set_head(args, batch, head);
        pairs.set_head(head);
        dropout.set_head(batch, head);
        dbias.set_head(args, batch, head);
    }
    // Whether the kernel's tile has no pair that is hidden.
    __device__ __forceinline__ bool full(QueryTiles tiles, int q_tile) const {
        return tiles.full(q_tile) && pairs.sees_all(q_tile, k_start / BLOCK_K);
    }
};

// S becomes P = exp(scale S - lse), or that of its scores, of which `derivatives` is told.
__device__ __forceinline__ void probabilities(
    Scores& s, Scores& derivatives, u32 lse_rows, const TilePair& at) {
    const int shift = at.mask.seqlen_k - at.mask.seqlen_q;
    const int first_key = at.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            const float lse = effective_lse(load_shared_float(lse_rows + row * 4));
            const float past = static_cast<float>(at.q_start + row + shift - first_key);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int x = half * 2; x < half * 2 + 2; ++x)
                    if constexpr (LINEAR) {
                        s[i][j][x] = weight(s[i][j][x], at.scale, lse);
                    } else {
                        const float score = at.steps.score(
                            s[i][j][x], past - static_cast<float>(j * 8 + x % 2),
                            at.steps.bias_of(at.q_start + row, first_key + j * 8 + x % 2),
                            derivatives[i][j][x]);
                        s[i][j][x] = weight(score, 1.0f, lse);
                    }
        }
}

// Which of the lane's pairs dropout keeps: bit 2 j + k is of its key k of fragment j.
using Kept = u32[ScoreGrid::M_TILES][2];

__device__ __forceinline__ void find_kept(Kept& kept, const TilePair& at) {
    const int first_query = at.q_start + ScoreGrid::first_row() + threadIdx.x % 32 / 4;
    const int first_key = at.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            kept[i][half] = at.dropout.kept_bits<ScoreGrid::N_TILES>(
                first_query + i * 16 + half * 8, first_key);
}

// x times Z, the factors of dropout.
__device__ __forceinline__ void apply_dropout(Scores& x, const Kept& kept, const TilePair& at) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
                const bool is_kept = (kept[i][k / 2] >> (j * 2 + k % 2)) & 1;
                x[i][j][k] *= is_kept ? at.dropout.factor : 0.0f;
            }
}

__device__ __forceinline__ void copy(Scores& to, const Scores& from) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int k = 0; k < 4; ++k) to[i][j][k] = from[i][j][k];
}

__device__ __forceinline__ void multiply(Scores& x, const Scores& factors) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int k = 0; k < 4; ++k) x[i][j][k] *= factors[i][j][k];
}

// P = dS = 0 where the query does not see the key or is none, whatever stood there.
__device__ __forceinline__ void apply_mask(Scores& x, const TilePair& at) {
    const int first_query = at.q_start + ScoreGrid::first_row() + threadIdx.x % 32 / 4;
    const int first_key = at.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + i * 16 + half * 8;
            const int num_keys = query < at.mask.seqlen_q ? at.mask.num_keys(query) : 0;
            const int first_seen = at.mask.first_key(query);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int key = first_key + j * 8 + k;
                    if (key >= num_keys) x[i][j][half * 2 + k] = 0.0f;
                    if (WINDOW && key < first_seen) x[i][j][half * 2 + k] = 0.0f;
                    if constexpr (PAIRWISE)
                        if (key < num_keys && !at.pairs.visible(query, key))
                            x[i][j][half * 2 + k] = 0.0f;
                }
        }
}

// dS = P (dP - delta), from P as it was rounded (times the scores' derivatives with SOFTCAP). dP
// becomes dS.
__device__ __forceinline__ void score_gradients(Scores& dp, const PackedScores& p, u32 delta_rows) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            const float delta = load_shared_float(delta_rows + row * 4);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j) {
                float &low = dp[i][j][half * 2], &high = dp[i][j][half * 2 + 1];
                low = to_float(low_half<Element>(p[i][j][half])) * (low - delta);
                high = to_float(high_half<Element>(p[i][j][half])) * (high - delta);
            }
        }
}

// The lane's pairs to the sums of dbias.
__device__ __forceinline__ void add_dbias(const Scores& ds, const TilePair& at) {
    const int first_query = at.q_start + ScoreGrid::first_row() + threadIdx.x % 32 / 4;
    const int first_key = at.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < ScoreGrid::N_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x)
                at.dbias.add(first_query + i * 16 + x / 2 * 8, first_key + j * 8 + x % 2,
                             ds[i][j][x]);
}

// D += A B over the queries or keys of a tile, for the warp's rows and columns of D. A is P^T or
// dS^T and B is dO or Q or, with QUERY_ROWS, A is dS and B is K. A NaN or an infinity in B would
// spread to rows of D that do not see B's row, as 0 * NaN: if there is one, only finite values are
// multiplied, and repair() adds the others.
template <bool QUERY_ROWS, int B_ROWS, bool MASKED, int M_TILES, int N_TILES>
__device__ __forceinline__ void gradient_product(
    float (&d)[M_TILES][N_TILES][4], u32 a_tile, u32 b_tile, int first_row, int first_column,
    bool nonfinite) {
    using A = OperandA<BLOCK_Q, QUERY_ROWS ? Stored::AS_NAMED : Stored::TRANSPOSED, M_TILES>;
    using B = OperandB<B_ROWS, Stored::AS_NAMED, N_TILES / 2>;
    const A a(a_tile, first_row);
    const B b(b_tile, first_column);
    if (MASKED && nonfinite) product<Element, B_ROWS / 16>(d, a, Sanitized<Element, B>{b});
    else product<Element, B_ROWS / 16>(d, a, b);
}

// Scales a gradient, rounds it and stores it through the shared tile. By the whole block.
template <class Grid, int COLUMNS, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_gradient(
    float (&gradient)[M_TILES][N_TILES][4], float scale, u32 tile, void* target, Strides stride,
    TileCoord where, int num_rows, int num_columns) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int x = 0; x < 4; ++x) gradient[m][n][x] *= scale;
    Packed<M_TILES, N_TILES> packed;
    pack_fragments<Element>(packed, gradient);
    store_fragments<BLOCK_K>(tile, packed, Grid::first_row(), Grid::first_column());
    __syncthreads();
    const i64 first_row = static_cast<i64>(where.tile) * BLOCK_K;
    u16* rows = static_cast<u16*>(target)
              + where.batch * stride.batch + where.head * stride.head + first_row * stride.token;
    store_tile<BLOCK_K, COLUMNS, THREADS, BLOCK_K>(
        tile, 0, rows, stride.token, num_rows, num_columns, rows_aligned(target, stride),
        threadIdx.x);
}

// x += weight * value where the value is NaN or infinite.
__device__ __forceinline__ void add_nonfinite(Element& x, float weight, float value) {
    if (is_nonfinite(value))
        x = low_half<Element>(pack<Element>(to_float(x) + weight * value, 0.0f));
}

// Adds to dV, dK and the sums of dQ what gradient_product() left out: the NaNs and infinities of
// dO, Q and K, in query tiles that the mask cuts, for visible pairs. A warp takes a key at a time
// and the queries one after the other, so no two write one row of dV or dK. Slow, rare.
__device__ __forceinline__ void repair(
    const Arguments& args, TileCoord where, TilePair at, QueryTiles tiles) {
    const BackwardArguments& arguments = arrays_of(args);
    const auto& mask = at.mask;
    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % 32, group_size = shape.num_heads_q / shape.num_heads_kv;
    const int num_q_tiles = num_query_tiles(args, BLOCK_Q);
    const float scale = static_cast<float>(arguments.scale);
    const HeadRows k(arguments.k, arguments.k_stride, where.batch, where.head);
    const HeadRows v(arguments.v, arguments.v_stride, where.batch, where.head);
    const Strides dks = arguments.dk_stride, dvs = arguments.dv_stride;
    __syncthreads();                                        // the block has stored dK and dV
    for (int j = threadIdx.x / 32; j < BLOCK_K; j += NUM_WARPS) {
        const int key = where.tile * BLOCK_K + j;
        if (key >= shape.seqlen_k) return;
        Element* dk = static_cast<Element*>(arguments.dk)
                    + where.batch * dks.batch + where.head * dks.head + key * dks.token;
        Element* dv = static_cast<Element*>(arguments.dv)
                    + where.batch * dvs.batch + where.head * dvs.head + key * dvs.token;
        for (int head = where.head * group_size; head < (where.head + 1) * group_size; ++head) {
            const HeadRows q(arguments.q, arguments.q_stride, where.batch, head);
            const HeadRows dout(arguments.dout, arguments.dout_stride, where.batch, head);
            const i64 pair = static_cast<i64>(where.batch) * shape.num_heads_q + head;
            at.set_head(args, where.batch, head);
            for (int query = mask.first_query(key); query < mask.end_query(key); ++query) {
                if (at.full(tiles, query / BLOCK_Q)) continue;
                if (PAIRWISE && !at.pairs.visible(query, key)) continue;
                const float lse =
                    static_cast<const float*>(arguments.lse)[pair * rows_of_head(args) + query];
                const float delta =
                    static_cast<const float*>(arguments.delta)[pair * rows_of_head(args) + query];
                const float s = row_product(q, query, k, key, shape.head_dim);
                float derivative = 1.0f;
                const float past =
                    static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key);
                const float p = LINEAR
                    ? weight(s, scale, effective_lse(lse))
                    : weight(at.steps.score(s, past, at.steps.bias_of(query, key), derivative),
                             1.0f, effective_lse(lse));
                const float z = at.dropout.z(query, key);
                const float dp = row_product(dout, query, v, key, shape.head_dim_v);
                const float ds = p * ((DROPOUT ? z * dp : dp) - delta) * derivative;
                for (int d = lane; d < shape.head_dim_v; d += 32)
                    add_nonfinite(dv[d], DROPOUT ? z * p : p, dout.at(query, d));
                for (int d = lane; d < shape.head_dim; d += 32) {
                    add_nonfinite(dk[d], ds * scale, q.at(query, d));
                    const float value = k.at(key, d);
                    float* sum = dq_sum_tile(
                        arguments.dq_sum, pair * num_q_tiles + query / BLOCK_Q);
                    if (is_nonfinite(value))
                        atomicAdd(sum + dq_sum_place(query % BLOCK_Q, d), ds * value);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_mma(const __grid_constant__ Arguments whole) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const u32 k_tile = shared_address(&shared.k), v_tile = shared_address(&shared.v);
    const u32 p_tile = shared_address(&shared.p), ds_tile = shared_address(&shared.ds);

    // Prologue: which keys; which query tiles see them.
    const Shape& grid = arrays_of(whole).shape;
    const int num_k_tiles = num_key_tiles(whole, BLOCK_K);
    const int num_q_tiles = num_query_tiles(whole, BLOCK_Q);
    const int group_size = grid.num_heads_q / grid.num_heads_kv;
    TileCoord where = tile_of_block(
        number_of_block(arrays_of(whole).turns, shared_bytes), num_k_tiles, grid.num_heads_kv,
        grid.batch, arrays_of(whole).schedule);
    const auto sequence = sequence_of_block<true>(whole, where.tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = of_sequence(whole, sequence, BLOCK_Q, BLOCK_Q * HEAD_DIM);
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const int k_start = where.tile * BLOCK_K;
    const float scale = static_cast<float>(arguments.scale);
    TilePair at{{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)}, 0, k_start, scale,
                ScoreMod<float>(args), Pairs(args, where.batch), Dropout<float>(args), {}};
    const QueryTiles tiles = at.mask.query_tiles(k_start, BLOCK_Q, BLOCK_K);
    const Strides qs = arguments.q_stride, dos = arguments.dout_stride;

    // Starts the copies of the next query tile, one group: the tiles [first, end) of the group's
    // first head, then of its second, and so on. `row`: where its lse and delta stand.
    const auto after = [&](int tile) {
        return at.pairs.query_tile_after(tile, where.tile, tiles.end);
    };
    const int first_tile = SEGMENTS ? after(tiles.first - 1) : tiles.first;
    const int first_head = where.head * group_size, tiles_of_head = tiles.end - first_tile;
    const i64 first_row = static_cast<i64>(first_tile) * BLOCK_Q;
    const u16* q = thread_source(
        arguments.q, where.batch * qs.batch + first_head * qs.head + first_row * qs.token,
        qs.token);
    const u16* dout = thread_source(
        arguments.dout, where.batch * dos.batch + first_head * dos.head + first_row * dos.token,
        dos.token);
    i64 row = (static_cast<i64>(where.batch) * shape.num_heads_q + first_head) * rows_of_head(args)
            + first_row;
    // Tiles; or, where not all are visited, heads.
    int loads_left = SEGMENTS ? (tiles_of_head > 0 ? group_size : 0) : tiles_of_head * group_size;
    int next_tile = first_tile;
    const auto load_queries = [&](int stage) {
        if (SEGMENTS ? loads_left <= 0 : loads_left-- <= 0) return;
        const int num_rows = shape.seqlen_q - next_tile * BLOCK_Q;
        load_tile<BLOCK_Q, HEAD_DIM, THREADS, missing<PADDED>(true)>(
            shared_address(&shared.q[stage]), q, qs.token, num_rows, shape.head_dim);
        load_tile<BLOCK_Q, HEAD_DIM_V, THREADS, missing<PADDED>(true)>(
            shared_address(&shared.dout[stage]), dout, dos.token, num_rows, shape.head_dim_v);
        for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
            const int bytes = i < num_rows ? 4 : 0;
            cp_async_4(shared_address(&shared.lse[stage][i]),
                       static_cast<const float*>(arguments.lse) + row + i, bytes);
            cp_async_4(shared_address(&shared.delta[stage][i]),
                       static_cast<const float*>(arguments.delta) + row + i, bytes);
        }
        cp_async_commit();
        int tiles_on = 1, heads_on = 0;
        if constexpr (SEGMENTS) {
            const int loaded = next_tile;
            next_tile = after(next_tile);
            heads_on = next_tile == tiles.end ? 1 : 0;
            if (heads_on) next_tile = first_tile;
            loads_left -= heads_on;
            tiles_on = next_tile - loaded;
        } else if (++next_tile == tiles.end) {
            next_tile = first_tile;
            tiles_on -= tiles_of_head;
            heads_on = 1;
        }
        q += tiles_on * (BLOCK_Q * qs.token) + heads_on * qs.head;
        dout += tiles_on * (BLOCK_Q * dos.token) + heads_on * dos.head;
        row += tiles_on * BLOCK_Q + heads_on * rows_of_head(args);
    };

    KeyGrid::Fragments dk;
    ValueGrid::Fragments dv;
    set_zero(dk);
    set_zero(dv);

    const int num_rows = shape.seqlen_k - k_start;
    {
        const Strides ks = arguments.k_stride, vs = arguments.v_stride;
        const u16* k = thread_source(
            arguments.k, where.batch * ks.batch + where.head * ks.head + k_start * ks.token,
            ks.token);
        const u16* v = thread_source(
            arguments.v, where.batch * vs.batch + where.head * vs.head + k_start * vs.token,
            vs.token);
        load_tile<BLOCK_K, HEAD_DIM, THREADS, missing<PADDED>(true)>(
            k_tile, k, ks.token, num_rows, shape.head_dim);
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS, missing<PADDED>(true)>(
            v_tile, v, vs.token, num_rows, shape.head_dim_v);
    }

    if (WINDOW || SEGMENTS || PACKED) cp_async_commit();    // there may be no query tile
    load_queries(0);
    cp_async_wait<0>();
    const bool k_nonfinite = __syncthreads_or(
        loaded_nonfinite<Element, BLOCK_K, HEAD_DIM, THREADS>(k_tile));

    // dQ = dS K of a tile, added to its sum, DQ_SLICE columns of 8 at a time.
    const auto add_dq = [&](auto masked, int head, int tile) {
        const i64 pair = static_cast<i64>(where.batch) * shape.num_heads_q + head;
        int* turn = dq_semaphore(arguments.turns, pair * num_q_tiles + tile);
        float* sum = dq_sum_tile(arguments.dq_sum, pair * num_q_tiles + tile)
                   + dq_sum_first(threadIdx.x);
        // Turns are counted from the first key tile that visits the query tile.
        const int own_turn = WINDOW || SEGMENTS
            ? at.pairs.key_tiles_before(
                  tile, where.tile, at.mask.first_key(tile * BLOCK_Q) / BLOCK_K)
            : where.tile;
        if (DETERMINISTIC) semaphore_wait(turn, own_turn);
        #pragma unroll
        for (int first = 0; first < QueryGrid::N_TILES; first += DQ_SLICE) {
            float dq[QueryGrid::M_TILES][DQ_SLICE][4];
            set_zero(dq);
            gradient_product<true, BLOCK_K, masked.value>(
                dq, ds_tile, k_tile, QueryGrid::first_row(), QueryGrid::first_column() + first * 8,
                k_nonfinite);
            #pragma unroll
            for (int m = 0; m < QueryGrid::M_TILES; ++m)
                #pragma unroll
                for (int n = 0; n < DQ_SLICE; ++n)
                    reduce_add_4(sum + dq_sum_step(m, first + n), dq[m][n]);
        }
        if (DETERMINISTIC) pass_turn(turn, own_turn);
    };

    // One query tile: its Q and dO are on their way to `stage`, the other stage's place is free
    // once all warps are past the first barrier.
    int stage = 0;
    bool needs_repair = false;                              // the same in all threads
    const auto step = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const u32 q_tile = shared_address(&shared.q[stage]);
        const u32 dout_tile = shared_address(&shared.dout[stage]);
        at.q_start = tile * BLOCK_Q;
        cp_async_wait<0>();
        bool nonfinite = false;                             // in Q or dO
        if constexpr (MASKED)
            nonfinite = __syncthreads_or(
                loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM, THREADS>(q_tile)
                || loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM_V, THREADS>(dout_tile));
        else
            __syncthreads();
        if constexpr (MASKED) needs_repair |= nonfinite || k_nonfinite;
        if (NUM_STAGES == 2) load_queries(stage ^ 1);

        Scores s;                                           // S, then P
        set_zero(s);
        product<Element, HEAD_DIM / 16>(s, ScoreRows(q_tile, ScoreGrid::first_row()),
                                        ScoreColumns(k_tile, ScoreGrid::first_column()));
        Scores derivatives;                                 // of scores; with SOFTCAP alone
        probabilities(s, derivatives, shared_address(&shared.lse[stage]), at);
        if constexpr (MASKED) apply_mask(s, at);
        PackedScores p;
        Kept kept;
        if constexpr (DROPOUT) {                            // P Z for dV; P for dS
            Scores dropped;
            copy(dropped, s);
            find_kept(kept, at);
            apply_dropout(dropped, kept, at);
            pack_fragments<Element>(p, dropped);
        } else {
            pack_fragments<Element>(p, s);
        }
        store_fragments<BLOCK_Q>(p_tile, p, ScoreGrid::first_row(), ScoreGrid::first_column());
        if constexpr (SOFTCAP && !DBIAS) multiply(s, derivatives);
        if constexpr (SOFTCAP || DROPOUT) pack_fragments<Element>(p, s);

        Scores ds;                                          // dP, then dS
        set_zero(ds);
        product<Element, HEAD_DIM_V / 16>(ds, ScoreRows(dout_tile, ScoreGrid::first_row()),
                                          ScoreColumns(v_tile, ScoreGrid::first_column()));
        if constexpr (DROPOUT) apply_dropout(ds, kept, at);
        score_gradients(ds, p, shared_address(&shared.delta[stage]));
        if constexpr (DBIAS) {                              // is of dS without `derivatives`
            if constexpr (MASKED) apply_mask(ds, at);
            add_dbias(ds, at);
            if constexpr (SOFTCAP) multiply(ds, derivatives);
        }
        if constexpr (MASKED) apply_mask(ds, at);
        pack_fragments<Element>(p, ds);
        store_fragments<BLOCK_Q>(ds_tile, p, ScoreGrid::first_row(), ScoreGrid::first_column());
        __syncthreads();

        gradient_product<false, BLOCK_Q, MASKED>(
            dv, p_tile, dout_tile, ValueGrid::first_row(), ValueGrid::first_column(), nonfinite);
        add_dq(masked, head, tile);
        gradient_product<false, BLOCK_Q, MASKED>(
            dk, ds_tile, q_tile, KeyGrid::first_row(), KeyGrid::first_column(), nonfinite);

        if (NUM_STAGES == 1) {
            __syncthreads();
            load_queries(stage);
        } else {
            stage ^= 1;
        }
    };

    for (int head = first_head; head < first_head + group_size; ++head) {
        at.set_head(args, where.batch, head);
        for (int tile = first_tile; tile < tiles.end; tile = after(tile))
            if (at.full(tiles, tile)) step(Bool<false>{}, head, tile);
            else step(Bool<true>{}, head, tile);
    }

    // Epilogue: dK and dV leave through the places of K and V, once nobody reads those any more.
    __syncthreads();
    store_gradient<KeyGrid, HEAD_DIM>(
        dk, scale, k_tile, arguments.dk, arguments.dk_stride, where, num_rows, shape.head_dim);
    store_gradient<ValueGrid, HEAD_DIM_V>(
        dv, 1.0f, v_tile, arguments.dv, arguments.dv_stride, where, num_rows, shape.head_dim_v);
    if (needs_repair) repair(args, where, at, tiles);
}
