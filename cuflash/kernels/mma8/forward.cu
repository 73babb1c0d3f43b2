// Forward attention by mma.sync in steps of 8: for double, where tensor cores multiply doubles
// (sm_80, sm_90, sm_100, sm_103), and for float in parts (precision "tf32x3", sm_80 and newer).
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-2, Alg. 1 (arXiv:2307.08691), as sm80/forward.cu, but all in double, with the
// library's exp and log, or all in float. One block computes BLOCK_Q queries of one head and walks
// the key tiles that they see from the last to the first. P goes from the accumulators of S to the
// products with V without leaving registers (mma8.cuh).
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh).
// Block: NUM_WARPS warps of WARP_ROWS queries each.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM
// and HEAD_DIM_V, the head dimensions rounded up to multiples of 32; Arguments and the options
// (docs/masks.md): with them scale S above stands for the score that score_mod.cuh makes of it.
// Shared memory, in elements:
//     q  BLOCK_Q * (HEAD_DIM + 4)     k  BLOCK_K * (HEAD_DIM + 4)
//     v  BLOCK_K * (HEAD_DIM_V + VALUES_PAD), which is 2 for double and 4 for float
// K of the next step is under way while V of this one is used, and V while K is: two barriers a
// step.
//
// Bound by the products; exp takes some 30 instructions an element of S in double, which has
// HEAD_DIM + HEAD_DIM_V multiply-adds, and the parts of a float three for each operand. Bad at:
// head_dim_v above 128, for which acc is too large; NaN or infinity in V in a tile that the mask
// cuts.
#include "mma8/mma8.cuh"
#include "score/dropout.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "common/scheduler.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"

constexpr int WARP_ROWS = BLOCK_Q / NUM_WARPS;
constexpr int M_TILES = WARP_ROWS / 16, S_TILES = BLOCK_K / 8, O_TILES = HEAD_DIM_V / 8;

static_assert(BLOCK_Q % (NUM_WARPS * 16) == 0, "a warp needs whole 16-row tiles of queries");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "head_dim is padded to a multiple of 32");

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V, VALUES_PAD> v;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// m: the row's maximum of scores. l: this lane's share of the row's sum of P.
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
__device__ __forceinline__ double quad_sum(double x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// m = max(m_old, rowmax(x)),  P = exp(x - m),  l = l exp(m_old - m) + rowsum(P),  and acc by the
// same factor (FlashAttention-2, Alg. 1, lines 9 and 10); x, the scores, becomes P.
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
            // m = -inf: all scores so far are -inf, and exp(-inf - 0) = 0.
            const Element reference = m == -infinity() ? 0 : m;
            if (m != rows.m[i][half]) {
                const Element rescale = exponential(rows.m[i][half] - reference);
                rows.l[i][half] *= rescale;
                #pragma unroll
                for (int n = 0; n < O_TILES; ++n) {
                    acc[i][n][half * 2] *= rescale;
                    acc[i][n][half * 2 + 1] *= rescale;
                }
            }
            rows.m[i][half] = m;
            Element sum = 0;                                // see sm90/forward.cu
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int k = half * 2; k < half * 2 + 2; ++k) {
                    x[i][j][k] = exponential(x[i][j][k] - reference);
                    sum += x[i][j][k];
                }
            rows.l[i][half] += sum;
        }
}

// P = 0 where dropout drops the pair, and the others larger. first_query: the lane's.
__device__ __forceinline__ void apply_dropout(
    Scores& p, const Dropout<Element>& dropout, int first_query, int k_start) {
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 kept = dropout.kept_bits<S_TILES>(
                first_query + i * 16 + half * 8, k_start + threadIdx.x % 4 * 2);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x)
                    p[i][j][half * 2 + x] *=
                        (kept >> (j * 2 + x)) & 1 ? dropout.factor : Element(0);
        }
}

// acc += P V over visible pairs alone, without tensor cores: for a tile that the mask cuts and
// whose V holds a NaN or an infinity, as 0 * NaN is NaN. Slow, rare.
template <class F>
__device__ __forceinline__ void add_visible_rows(
    Output& acc, const Scores& p, const SharedPlan& shared, F visible) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < S_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 2; ++x)
                #pragma unroll 1
                for (int owner = 0; owner < 4; ++owner) {   // of the quad: has key 8j + 2 owner + x
                    const int key = j * 8 + 2 * owner + x;
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const Element weight = __shfl_sync(
                            WHOLE_WARP, p[i][j][half * 2 + x], lane / 4 * 4 + owner);
                        if (!visible(i * 16 + half * 8, key)) continue;
                        #pragma unroll
                        for (int n = 0; n < O_TILES; ++n)
                            #pragma unroll
                            for (int c = 0; c < 2; ++c) {
                                const int column =
                                    n / CHUNK * (8 * CHUNK) + CHUNK * (2 * t + c) + n % CHUNK;
                                Element& sum = acc[i][n][half * 2 + c];
                                sum = fma(weight, shared.v.at[key][column], sum);
                            }
                    }
                }
}

// O = acc / l and lse = m + log(l); rows that saw no key: 0 and -inf. A sink takes part in l.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord where, int first_query, const Output& acc,
    const Rows& state) {
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const Strides os = arguments.out_stride;
    const int t = threadIdx.x % 4;
    const bool aligned = rows_aligned(arguments.out, os);
    Element* out = static_cast<Element*>(arguments.out)
                 + where.batch * os.batch + where.head * os.head;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + i * 16 + half * 8;
            Element m = state.m[i][half], l = quad_sum(state.l[i][half]);
            if (query >= shape.seqlen_q) continue;
            Element rescale = 1;
            if constexpr (SINK) {
                const WithSink<Element> row_with_sink(m, l, sink_of<Element>(args, where.head));
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
                    store_chunk(out + query * os.token, n * 8 + CHUNK * (2 * t + c),
                                shape.head_dim_v, aligned, numbers);
                }
            if (arguments.lse != nullptr && t == 0) {
                const i64 head = static_cast<i64>(where.batch) * shape.num_heads_q + where.head;
                static_cast<Element*>(arguments.lse)[head * rows_of_head(args) + query] =
                    lse_of_row(m, l);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_mma8(const __grid_constant__ Arguments whole) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);

    // Prologue: which tile; the first Q and K are on their way.
    const Shape& grid = arrays_of(whole).shape;
    Mask<CAUSAL, WINDOW> mask{grid.seqlen_q, grid.seqlen_k, window_of<WINDOW>(whole)};
    const int num_tiles = PACKED
        ? num_query_tiles(whole, BLOCK_Q) : mask.num_tiles(grid.seqlen_q, BLOCK_Q);
    TileCoord where = tile_of_block(
        blockIdx.x, num_tiles, grid.num_heads_q, grid.batch, arrays_of(whole).schedule);
    where.tile = num_tiles - 1 - where.tile;
    const auto sequence = sequence_of_block<false>(whole, where.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = of_sequence(whole, sequence, BLOCK_Q);
    const ForwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    if constexpr (PACKED) {
        mask.seqlen_q = shape.seqlen_q;
        mask.seqlen_k = shape.seqlen_k;
    }
    const int q_start = where.tile * BLOCK_Q;
    const int kv_head = where.head / (shape.num_heads_q / shape.num_heads_kv);
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);

    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    const int first_query = q_start + warp_row + threadIdx.x % 32 / 4;
    ScoreMod<Element> score_mod(args);
    score_mod.set_head(args, where.batch, where.head);
    PairMask pair_mask(args, where.batch);
    pair_mask.set_head(where.head);
    Dropout<Element> dropout(args);
    dropout.set_head(where.batch, where.head);

    Rows rows;
    Output acc;
    set_zero<M_TILES, O_TILES>(acc);
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.m[i][half] = -infinity();
            rows.l[i][half] = 0;
        }

    const i64 k_step = arguments.k_stride.token, v_step = arguments.v_stride.token;
    const Element* k = head_start(arguments.k, arguments.k_stride, where.batch, kv_head);
    const Element* v = head_start(arguments.v, arguments.v_stride, where.batch, kv_head);
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

    const auto before = [&](int tile) {                     // the next of those that are visited
        return pair_mask.key_tile_before(where.tile, tile, tiles.first);
    };
    int tile = SEGMENTS ? before(tiles.num_visited) : tiles.num_visited - 1, next = 0;
    if (tile >= tiles.first) {
        const i64 step = arguments.q_stride.token;
        const Element* q = head_start(arguments.q, arguments.q_stride, where.batch, where.head);
        load_tile(shared.q, q + q_start * step, step, shape.seqlen_q - q_start, shape.head_dim);
        load_k(tile);
    }

    // One key tile: S, softmax, acc. At its start K of this tile is on its way, and V's place is
    // free once all warps are past the first barrier; K's place is free past the second.
    const auto step = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        const int k_start = tile * BLOCK_K;
        const auto visible = [&](int row, int key) {        // the lane's `row`, the tile's `key`
            const int query = first_query + row;
            if (WINDOW && k_start + key < mask.first_key(query)) return false;
            if (PAIRWISE && query < shape.seqlen_q && k_start + key < shape.seqlen_k
                && !pair_mask.visible(query, k_start + key)) return false;
            return k_start + key < mask.num_keys(first_query + row);
        };
        Scores s;
        cp_async_wait<0>();
        __syncthreads();
        load_v(tile);
        row_products(s, shared.q, warp_row, shared.k, 0);
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j)
                #pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const int row = i * 16 + x / 2 * 8;
                    const int column = j * 8 + threadIdx.x % 4 * 2 + x % 2;
                    const int query = first_query + row, key = k_start + column;
                    s[i][j][x] = score_mod.score(
                        s[i][j][x],
                        static_cast<Element>(query + (shape.seqlen_k - shape.seqlen_q) - key),
                        score_mod.bias_of(query, key));
                    if (MASKED && !visible(row, column)) s[i][j][x] = -infinity();
                }
        cp_async_wait<0>();
        bool nonfinite = false;
        if constexpr (MASKED) nonfinite = __syncthreads_or(loaded_nonfinite(shared.v));
        else __syncthreads();
        next = before(tile);
        if (next >= tiles.first) load_k(next);
        softmax_step(s, rows, acc);
        if constexpr (DROPOUT) apply_dropout(s, dropout, first_query, k_start);
        if (MASKED && nonfinite) add_visible_rows(acc, s, shared, visible);
        else add_weighted_rows(acc, s, shared.v);
    };

    if constexpr (WINDOW || PAIRWISE) {                     // cut anywhere
        for (; tile >= tiles.first; tile = next)
            if (tiles.full(tile) && pair_mask.sees_all(where.tile, tile)) step(Bool<false>{});
            else step(Bool<true>{});
    } else {
        for (; tile >= tiles.num_full; --tile) step(Bool<true>{});
        for (; tile >= 0; --tile) step(Bool<false>{});
    }

    store(args, where, first_query, acc, rows);
}
