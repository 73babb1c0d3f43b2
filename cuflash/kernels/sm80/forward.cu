// Forward attention for 16-bit types by mma.sync, sm_80 and newer.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-2, Alg. 1 (arXiv:2307.08691): one block computes BLOCK_Q queries of one head. It
// walks the key tiles that they see from the last to the first, keeping for each row the running
// maximum m of S, the sum l of P = exp(scale (S - m)) and the unnormalised output acc = P V. The
// tiles that the mask cuts come first; the loop over the others has no mask code.
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh).
// Block: NUM_WARPS warps of WARP_ROWS queries each.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM
// and HEAD_DIM_V, the head dimensions rounded up to multiples of 32; PADDED, whether that changed
// one of them; NEGATE_SCORES, whether scale < 0 and scores are LINEAR; Arguments and the options
// (docs/masks.md).
// Shared memory, in bytes, columns rounded up to multiples of 64 (smem.cuh):
//     q_then_out  BLOCK_Q * max(HEAD_DIM, HEAD_DIM_V) * 2     Q, in the end O
//     k           BLOCK_K * HEAD_DIM * 2
//     v           BLOCK_K * HEAD_DIM_V * 2
// K of the next step is under way while V of this one is used, and V while K is: two barriers a
// step.
//
// Bad at: Hopper, whose wgmma multiplies about twice as fast; few queries with many keys (one block
// a query tile, keys are not split).
#include "score/dropout.cuh"
#include "common/mask.cuh"
#include "sm80/mma.cuh"
#include "score/pair_mask.cuh"
#include "common/scheduler.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"

constexpr int THREADS = NUM_WARPS * 32, WARP_ROWS = BLOCK_Q / NUM_WARPS;
constexpr int M_TILES = WARP_ROWS / 16;                     // of the warp's rows
constexpr int S_TILES = BLOCK_K / 8, O_TILES = HEAD_DIM_V / 8;

static_assert(BLOCK_Q % (NUM_WARPS * 16) == 0, "a warp needs whole 16-row tiles of queries");
static_assert(BLOCK_K % 16 == 0, "P V takes 16 keys at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

struct SharedPlan {
    SmemTile<BLOCK_Q, (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V)> q_then_out;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Scores are kept as products S, which `c` scales in the exponent, if they are LINEAR; else as what
// score_mod.cuh makes of them, and c is log2(e).

// m: the row's maximum of scores. l: this lane's share of the row's sum of P.
struct Rows { float m[M_TILES][2], l[M_TILES][2]; };
using Scores = float[M_TILES][S_TILES][4];
using Output = float[M_TILES][O_TILES][4];

struct Problem {
    Mask<CAUSAL, WINDOW> mask;
    float c;                                                // |scale| log2(e), or log2(e)
    int first_row;                                          // the lane's first query
};

// S = Q K^T, or its negative if scale < 0: the softmax below takes |scale|.
__device__ __forceinline__ void scores(Scores& s, u32 q, u32 k) {
    set_zero(s);
    const int warp = threadIdx.x / 32;
    const OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES> queries(q, warp * WARP_ROWS);
    const OperandB<BLOCK_K, Stored::TRANSPOSED, S_TILES / 2> keys(k, 0);
    gemm<Element, HEAD_DIM / 16>(s, queries, keys);
    if (NEGATE_SCORES)
        for (auto& tile : s)
            for (auto& fragment : tile)
                for (float& x : fragment) x = -x;
}

// The scores of products of a tile; see ScoreMod.
__device__ __forceinline__ void apply_steps(
    Scores& s, const Problem& problem, const ScoreMod<float>& score_mod, int k_start) {
    const int shift = problem.mask.seqlen_k - problem.mask.seqlen_q;
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = problem.first_row + i * 16 + half * 8;
            const float distance = static_cast<float>(query + shift - first_key);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    float& score = s[i][j][half * 2 + x];
                    score = score_mod.score(score, distance - static_cast<float>(j * 8 + x),
                                        score_mod.bias_of(query, first_key + j * 8 + x));
                }
        }
}

// P = 0 where dropout drops the pair, and the others larger.
__device__ __forceinline__ void apply_dropout(
    Scores& p, const Problem& problem, const Dropout<float>& dropout, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = problem.first_row + i * 16 + half * 8;
            const u32 kept = dropout.kept_bits<S_TILES>(query, first_key);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x)
                    p[i][j][half * 2 + x] *= (kept >> (j * 2 + x)) & 1 ? dropout.factor : 0.0f;
        }
}

// S = -inf where the query does not see the key.
__device__ __forceinline__ void apply_mask(
    Scores& s, const Problem& problem, const PairMask& pair_mask, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = problem.first_row + i * 16 + half * 8;
            const int num_keys = problem.mask.num_keys(query);
            const int first_seen = problem.mask.first_key(query);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int key = first_key + j * 8 + x;
                    if (key >= num_keys) s[i][j][half * 2 + x] = -infinity();
                    if (WINDOW && key < first_seen) s[i][j][half * 2 + x] = -infinity();
                    if constexpr (PAIRWISE)
                        if (query < problem.mask.seqlen_q && key < num_keys
                            && !pair_mask.visible(query, key))
                            s[i][j][half * 2 + x] = -infinity();
                }
        }
}

// m = max(m_old, rowmax(S)),  P = 2^(c S - c m),  l = l 2^(c m_old - c m) + rowsum(P),  and acc by
// the same factor (FlashAttention-2, Alg. 1, lines 9 and 10). S becomes P. No barrier inside.
__device__ __forceinline__ void softmax_step(Scores& s, Rows& rows, Output& acc, float c) {
    float reference[M_TILES][2];
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float m = s[i][0][half * 2];
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                m = fmaxf(fmaxf(m, s[i][j][half * 2]), s[i][j][half * 2 + 1]);
            const float m_old = rows.m[i][half];
            m = fmaxf(m_old, quad_max(m));
            reference[i][half] = finite_reference(m, c);
            const float rescale = exp2_of_product(m_old, c, reference[i][half]);
            rows.m[i][half] = m;
            rows.l[i][half] *= rescale;
            #pragma unroll
            for (int j = 0; j < O_TILES; ++j) {
                acc[i][j][half * 2] *= rescale;
                acc[i][j][half * 2 + 1] *= rescale;
            }
        }
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
        float sum[2] = {0.0f, 0.0f};                        // see sm90/forward.cu
        #pragma unroll
        for (int j = 0; j < S_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x) {
                s[i][j][x] = exp2_of_product(s[i][j][x], c, reference[i][x / 2]);
                sum[x / 2] += s[i][j][x];
            }
        rows.l[i][0] += sum[0];
        rows.l[i][1] += sum[1];
    }
}

// acc += P V. A NaN or an infinity in V's tile would spread to queries that do not see its key, as
// 0 * NaN: if there is one, only finite values are multiplied, and repair() adds the others.
template <bool MASKED>
__device__ __forceinline__ void accumulate(Output& acc, const Scores& p, u32 v, bool nonfinite) {
    using Values = OperandB<BLOCK_K, Stored::AS_NAMED, O_TILES / 2>;
    constexpr int KEY_STEPS = BLOCK_K / 16;
    const RegisterA<Element, M_TILES, S_TILES> weights(p);
    const Values values(v, 0);
    if (MASKED && nonfinite)
        gemm<Element, KEY_STEPS, KEY_STEPS>(acc, weights, Sanitized<Element, Values>{values});
    else
        gemm<Element, KEY_STEPS, KEY_STEPS>(acc, weights, values);
}

// O = acc / l and lse = |scale| m + log(l); rows that saw no key: 0 and -inf. A sink takes part in
// l. Each warp stores its own rows: O goes through the place of Q, of which no other warp reads
// these rows.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord where, u32 out_tile, Output& acc, Rows& state) {
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = where.tile * BLOCK_Q + warp * WARP_ROWS;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + i * 16 + half * 8 + lane / 4;
            float m = state.m[i][half], l = quad_sum(state.l[i][half]);
            float rescale = 1.0f;
            if constexpr (SINK) {
                const float scale = LINEAR ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
                const WithSink<float> row_with_sink(
                    m == -infinity() ? m : m * scale, l, sink_of<float>(args, where.head));
                m = row_with_sink.top;
                l = row_with_sink.sum;
                rescale = row_with_sink.rescale;
            }
            const float inverse = l == 0.0f ? 0.0f : rescale / l;
            #pragma unroll
            for (int j = 0; j < O_TILES; ++j) {
                acc[i][j][half * 2] *= inverse;
                acc[i][j][half * 2 + 1] *= inverse;
            }
            if (arguments.lse != nullptr && lane % 4 == 0 && row < shape.seqlen_q) {
                const float scale =
                    LINEAR && !SINK ? fabsf(static_cast<float>(arguments.scale)) : 1.0f;
                const i64 head = static_cast<i64>(where.batch) * shape.num_heads_q + where.head;
                static_cast<float*>(arguments.lse)[head * rows_of_head(args) + row] =
                    lse_of_row(m * scale, l);
            }
        }
    Packed<M_TILES, O_TILES> out;
    pack_fragments<Element>(out, acc);
    store_fragments<BLOCK_Q>(out_tile, out, warp * WARP_ROWS, 0);
    __syncwarp();
    const Strides stride = arguments.out_stride;
    u16* rows = static_cast<u16*>(arguments.out)
              + where.batch * stride.batch + where.head * stride.head + warp_row * stride.token;
    store_tile<WARP_ROWS, HEAD_DIM_V, 32, BLOCK_Q>(
        out_tile, warp * WARP_ROWS, rows, stride.token, shape.seqlen_q - warp_row, shape.head_dim_v,
        rows_aligned(arguments.out, stride), lane);
}

// Adds to O what accumulate() left out: the NaNs and infinities of V in tiles that the mask cuts,
// each to the queries that see its key, times its weight, of which it matters only whether it is 0
// (0 * inf is NaN). m: the rows' maxima, in shared memory. By the whole block; slow, rare.
__device__ __forceinline__ void repair(
    const Arguments& args, TileCoord where, const Problem& problem, const ScoreMod<float>& score_mod,
    const PairMask& pair_mask, const Dropout<float>& dropout, const float* m) {
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const Strides qs = arguments.q_stride, ks = arguments.k_stride;
    const Strides vs = arguments.v_stride, os = arguments.out_stride;
    const int q_start = where.tile * BLOCK_Q;
    const int kv_head = where.head / (shape.num_heads_q / shape.num_heads_kv);
    const Element* q = static_cast<const Element*>(arguments.q)
                     + where.batch * qs.batch + where.head * qs.head;
    const Element* k = static_cast<const Element*>(arguments.k)
                     + where.batch * ks.batch + kv_head * ks.head;
    const Element* v = static_cast<const Element*>(arguments.v)
                     + where.batch * vs.batch + kv_head * vs.head;
    Element* out = static_cast<Element*>(arguments.out)
                 + where.batch * os.batch + where.head * os.head;
    const KeyTiles tiles = problem.mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int first_cut = tiles.num_full * BLOCK_K;
    for (int i = threadIdx.x; i < BLOCK_Q * shape.head_dim_v; i += THREADS) {
        const int row = i / shape.head_dim_v, column = i % shape.head_dim_v;
        const int query = q_start + row;
        if (query >= shape.seqlen_q) return;
        Element& x = out[query * os.token + column];
        for (int key = WINDOW || PAIRWISE ? problem.mask.first_key(query) : first_cut;
             key < problem.mask.num_keys(query); ++key) {
            if ((WINDOW || PAIRWISE) && tiles.full(key / BLOCK_K)
                && pair_mask.sees_all(where.tile, key / BLOCK_K)) continue;
            if (PAIRWISE && !pair_mask.visible(query, key)) continue;
            const float value = to_float(v[key * vs.token + column]);
            if (fabsf(value) < infinity()) continue;
            float score = 0.0f;
            for (int d = 0; d < shape.head_dim; ++d)
                score += to_float(q[query * qs.token + d]) * to_float(k[key * ks.token + d]);
            if (NEGATE_SCORES) score = -score;
            if (!LINEAR)
                score = score_mod.score(
                    score, static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key),
                    score_mod.bias_of(query, key));
            float weight = m[row] == -infinity()
                ? 0.0f : exp2_of_product(score, problem.c, finite_reference(m[row], problem.c));
            if (DROPOUT) weight *= dropout.z(query, key);
            x = low_half<Element>(pack<Element>(to_float(x) + weight * value, 0.0f));
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
forward_mma(const __grid_constant__ Arguments whole) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const u32 q_tile = shared_address(&shared.q_then_out);
    const u32 k_tile = shared_address(&shared.k), v_tile = shared_address(&shared.v);

    // Prologue: which tile; the first Q and K are on their way.
    TileCoord where = tile_of_this_block(whole);
    const auto sequence = sequence_of_block<false>(whole, where.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = of_sequence(whole, sequence, BLOCK_Q);
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const int q_start = where.tile * BLOCK_Q;
    const int kv_head = where.head / (shape.num_heads_q / shape.num_heads_kv);
    const Strides qs = arguments.q_stride, ks = arguments.k_stride, vs = arguments.v_stride;

    const int lane_row = q_start + threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / 4;
    const float scale = fabsf(static_cast<float>(arguments.scale));
    // Never 0: 0 * inf is NaN.
    const float c = LINEAR ? fmaxf(scale * LOG2_E, 1.2e-38f) : LOG2_E;
    const Problem problem{
        {shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)}, c, lane_row};
    ScoreMod<float> score_mod(args);
    score_mod.set_head(args, where.batch, where.head);
    PairMask pair_mask(args, where.batch);
    pair_mask.set_head(where.head);
    Dropout<float> dropout(args);
    dropout.set_head(where.batch, where.head);
    const KeyTiles tiles = problem.mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);

    Rows rows;
    Output acc;
    set_zero(acc);
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.m[i][half] = -infinity();
            rows.l[i][half] = 0.0f;
        }

    // Loads of K and V go down from the last tile, one tile a call; each is one group.
    const i64 last_key = static_cast<i64>(tiles.num_visited - 1) * BLOCK_K;
    const u16* k = thread_source(
        arguments.k, where.batch * ks.batch + kv_head * ks.head + last_key * ks.token, ks.token);
    const u16* v = thread_source(
        arguments.v, where.batch * vs.batch + kv_head * vs.head + last_key * vs.token, vs.token);
    const auto source = [&](const u16* next, int tile, i64 stride) {
        if constexpr (SEGMENTS)                             // not all tiles are visited
            return next - (tiles.num_visited - 1 - tile) * (BLOCK_K * stride);
        else
            return next;
    };
    const auto load_k = [&](int tile, auto ragged) {
        load_tile<BLOCK_K, HEAD_DIM, THREADS, missing<PADDED>(ragged.value)>(
            k_tile, source(k, tile, ks.token), ks.token, shape.seqlen_k - tile * BLOCK_K,
            shape.head_dim);
        cp_async_commit();
        if (!SEGMENTS) k -= BLOCK_K * ks.token;
    };
    const auto load_v = [&](int tile, auto ragged) {
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS, missing<PADDED>(ragged.value)>(
            v_tile, source(v, tile, vs.token), vs.token, shape.seqlen_k - tile * BLOCK_K,
            shape.head_dim_v);
        cp_async_commit();
        if (!SEGMENTS) v -= BLOCK_K * vs.token;
    };

    int tile = pair_mask.key_tile_before(where.tile, tiles.num_visited, tiles.first), next = 0;
    if (tile >= tiles.first) {
        const u16* q = thread_source(
            arguments.q, where.batch * qs.batch + where.head * qs.head + q_start * qs.token,
            qs.token);
        load_tile<BLOCK_Q, HEAD_DIM, THREADS, missing<PADDED>(true)>(
            q_tile, q, qs.token, shape.seqlen_q - q_start, shape.head_dim);
        load_k(tile, Bool<true>{});
    }

    bool needs_repair = false;                              // the same in all threads

    // One key tile: S, softmax, acc. At its start K of this tile is on its way, and V's place is
    // free once all warps are past the first barrier; K's place is free past the second.
    const auto step = [&](auto masked) {
        Scores s;
        cp_async_wait<0>();
        __syncthreads();
        load_v(tile, masked);
        scores(s, q_tile, k_tile);
        if constexpr (!LINEAR) apply_steps(s, problem, score_mod, tile * BLOCK_K);
        if constexpr (masked.value) apply_mask(s, problem, pair_mask, tile * BLOCK_K);
        cp_async_wait<0>();
        bool nonfinite = false;
        if constexpr (masked.value)
            nonfinite = __syncthreads_or(
                loaded_nonfinite<Element, BLOCK_K, HEAD_DIM_V, THREADS>(v_tile));
        else
            __syncthreads();
        next = pair_mask.key_tile_before(q_start / BLOCK_Q, tile, tiles.first);
        if (next >= tiles.first) load_k(next, Bool<false>{});
        softmax_step(s, rows, acc, problem.c);
        if constexpr (DROPOUT) apply_dropout(s, problem, dropout, tile * BLOCK_K);
        accumulate<masked.value>(acc, s, v_tile, nonfinite);
        if constexpr (masked.value) needs_repair |= nonfinite;
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
    store(again, where, q_tile, acc, rows);
    if (needs_repair) {
        // All are past the last step's second barrier: K is done with.
        float* m = reinterpret_cast<float*>(&shared.k);
        if (threadIdx.x % 4 == 0)                           // a quad's lanes have the same m
            for (int i = 0; i < M_TILES; ++i)
                for (int half = 0; half < 2; ++half)
                    m[lane_row - q_start + i * 16 + half * 8] = rows.m[i][half];
        __syncthreads();
        repair(again, where, problem, score_mod, pair_mask, dropout, m);
    }
}
