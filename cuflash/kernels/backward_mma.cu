// Backward attention for 16-bit types by mma.sync, sm_80 and newer: dK, dV, and the sums of dQ.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691): one block computes BLOCK_K keys of one key head. It walks
// the query tiles of every query head of the group and keeps dK and dV in registers. Its share of dQ it
// adds in float32 to a sum in global memory, that backward_dq.cu scales and rounds. DETERMINISTIC: the
// blocks of one head add to a query tile in the order of their key tiles.
//
// Block: NUM_WARPS warps; how they share each product: backward_layout.cuh. Grid: key tiles of all
// (batch, key head) pairs, the first tiles, which most queries see, first (scheduler.cuh).
//
// Shared memory: K and V of the tile; NUM_STAGES of Q, dO, lse and delta; P and dS, which change hands
// between warps. Barriers a step: one when Q and dO have come, one when P and dS are written, and with
// one stage a third before the next load.
//
// Bad at: Hopper and newer, whose wgmma does twice the products; few long key tiles.
#include "backward_layout.cuh"
#include "mask.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

struct SharedPlan {
    Tile<BLOCK_K, HEAD_DIM> k;                              // dK leaves through it
    Tile<BLOCK_K, HEAD_DIM_V> v;                            // dV leaves through it
    Tile<BLOCK_Q, HEAD_DIM> q[NUM_STAGES];
    Tile<BLOCK_Q, HEAD_DIM_V> dout[NUM_STAGES];
    Tile<BLOCK_Q, BLOCK_K> p, ds;
    alignas(1024) float lse[NUM_STAGES][BLOCK_Q];
    float delta[NUM_STAGES][BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "plan.py and the kernel disagree on shared memory");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "the loop below knows one or two stages");

// What a load may find missing: PADDED where the array's head_dim is less than the kernel's.
constexpr Missing missing(bool ragged) {
    return ragged ? Missing::ROWS_AND_COLUMNS : PADDED ? Missing::COLUMNS : Missing::NOTHING;
}

using Scores = ScoreGrid::Fragments;

// Where a tile of pairs lies, and what its exponentials need.
struct TilePair {
    Mask<CAUSAL> mask;
    int q_start, k_start;
    float scale, c;                                         // c = scale * log2(e)
};

// A query's lse as the exponentials want it: rows that see no key, or do not exist, get P = 0.
__device__ __forceinline__ float effective_lse(float lse, bool exists) {
    return exists && lse != -infinity() ? lse : infinity();
}

// S becomes P = exp(scale S - lse): 2^(c S - lse log2(e)) or, FAR, from the very product that the
// forward pass rounded, so that a row's winner gets the weight that it had there.
template <bool IS_FAR>
__device__ __forceinline__ void exponentials(Scores& s, const float (&lse)[ScoreGrid::M_TILES][2], const TilePair& at) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float lse_log2 = lse[i][half] * LOG2_E;
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int x = half * 2; x < half * 2 + 2; ++x)
                    s[i][j][x] = IS_FAR ? exp2_approx((__fmul_rn(s[i][j][x], at.scale) - lse[i][half]) * LOG2_E)
                                        : exp2_near(s[i][j][x], at.c, lse_log2);
        }
}

__device__ __forceinline__ void probabilities(Scores& s, u32 lse_rows, const TilePair& at, int num_queries) {
    float lse[ScoreGrid::M_TILES][2];
    bool far = false;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            lse[i][half] = effective_lse(load_shared_float(lse_rows + row * 4), row < num_queries);
            far |= fabsf(lse[i][half]) > FAR_LSE && lse[i][half] < infinity();
        }
    if (__any_sync(WHOLE_WARP, far)) exponentials<true>(s, lse, at);
    else exponentials<false>(s, lse, at);
}

// P = dS = 0 where the query does not see the key, whatever stood there.
__device__ __forceinline__ void apply_mask(Scores& x, const TilePair& at) {
    const int first_query = at.q_start + ScoreGrid::first_row() + threadIdx.x % 32 / 4;
    const int first_key = at.k_start + ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int num_keys = at.mask.num_keys(first_query + i * 16 + half * 8);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (first_key + j * 8 + k >= num_keys) x[i][j][half * 2 + k] = 0.0f;
        }
}

// dS = P (dP - delta). dP becomes dS.
__device__ __forceinline__ void score_gradients(Scores& dp, const Scores& p, u32 delta_rows) {
    #pragma unroll
    for (int i = 0; i < ScoreGrid::M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            const float delta = load_shared_float(delta_rows + row * 4);
            #pragma unroll
            for (int j = 0; j < ScoreGrid::N_TILES; ++j)
                #pragma unroll
                for (int x = half * 2; x < half * 2 + 2; ++x) dp[i][j][x] = p[i][j][x] * (dp[i][j][x] - delta);
        }
}

// D += A B where B's NaNs and infinities must reach only the rows of D whose pair with them is visible
// (0 * NaN is NaN): finite values go through the product, the others are added one by one. A is P or
// dS, [query][key] in a tile; QUERY_ROWS: the rows of D are queries (dQ), else keys (dK, dV). Rare.
template <class Grid, bool QUERY_ROWS, int B_ROWS, int M_TILES, int N_TILES>
__device__ __forceinline__ void add_nonfinite(float (&d)[M_TILES][N_TILES][4], u32 a, u32 b, const TilePair& at) {
    #pragma unroll 1
    for (int k = 0; k < B_ROWS; ++k)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const u32 pair = load_shared(b + tile_offset<B_ROWS>(k, Grid::first_column() + n * 8 + threadIdx.x % 4 * 2));
            const u32 bad = nonfinite_bits<Element>(pair);
            if (bad == 0) continue;
            #pragma unroll
            for (int m = 0; m < M_TILES; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = Grid::first_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
                    const int query = QUERY_ROWS ? row : k, key = QUERY_ROWS ? k : row;
                    if (!at.mask.visible(at.q_start + query, at.k_start + key)) continue;
                    const u32 weights = load_shared(a + tile_offset<BLOCK_Q>(query, key & ~1));
                    const float weight = to_float(key & 1 ? high_half<Element>(weights) : low_half<Element>(weights));
                    if (bad & 0x00008000u) d[m][n][half * 2] += weight * to_float(low_half<Element>(pair));
                    if (bad & 0x80000000u) d[m][n][half * 2 + 1] += weight * to_float(high_half<Element>(pair));
                }
        }
}

// D += A B over the K_STEPS * 16 queries or keys of a tile; `nonfinite`: as add_nonfinite says.
template <class Grid, bool QUERY_ROWS, int K_STEPS, int B_ROWS, bool MASKED, int M_TILES, int N_TILES>
__device__ __forceinline__ void gradient_product(
    float (&d)[M_TILES][N_TILES][4], u32 a_tile, u32 b_tile, const TilePair& at, bool nonfinite) {
    const OperandA<BLOCK_Q, QUERY_ROWS ? Stored::AS_NAMED : Stored::TRANSPOSED, M_TILES> a(a_tile, Grid::first_row());
    const OperandB<B_ROWS, Stored::AS_NAMED, N_TILES / 2> b(b_tile, Grid::first_column());
    if (MASKED && nonfinite) {
        product<Element, K_STEPS>(d, a, Sanitized<Element, OperandB<B_ROWS, Stored::AS_NAMED, N_TILES / 2>>{b});
        add_nonfinite<Grid, QUERY_ROWS, B_ROWS>(d, a_tile, b_tile, at);
    } else {
        product<Element, K_STEPS>(d, a, b);
    }
}

// Adds the tile's dQ to its sum. DETERMINISTIC: after the key tiles before this one, before those behind;
// they were launched before it, so the wait ends.
__device__ __forceinline__ void add_dq(const QueryGrid::Fragments& dq, float* sum, int* turn, int k_tile) {
    if (DETERMINISTIC) {
        if (threadIdx.x == 0) while (load_acquire(turn) != k_tile) {}
        __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < QueryGrid::M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < QueryGrid::N_TILES; ++n) reduce_add_4(sum + dq_sum_offset(m, n), dq[m][n]);
    if (DETERMINISTIC) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) store_release(turn, k_tile + 1);
    }
}

// Scales a gradient, rounds it and stores it through the shared tile. By the whole block.
template <class Grid, int COLUMNS, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_gradient(
    float (&gradient)[M_TILES][N_TILES][4], float scale, u32 tile, void* target, Strides stride,
    TileOfHead where, int num_rows, int num_columns) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int x = 0; x < 4; ++x) gradient[m][n][x] *= scale;
    store_fragments<Element, BLOCK_K>(tile, gradient, Grid::first_row(), Grid::first_column());
    __syncthreads();
    const i64 first_row = static_cast<i64>(where.tile) * BLOCK_K;
    u16* rows = static_cast<u16*>(target)
              + where.batch * stride.batch + where.head * stride.head + first_row * stride.token;
    store_tile<BLOCK_K, COLUMNS, THREADS, BLOCK_K>(
        tile, 0, rows, stride.token, num_rows, num_columns, rows_aligned(target, stride), threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_mma(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const u32 k_tile = shared_address(&shared.k), v_tile = shared_address(&shared.v);
    const u32 p_tile = shared_address(&shared.p), ds_tile = shared_address(&shared.ds);

    // Prologue: which keys; which query tiles see them.
    const Shape& shape = arguments.shape;
    const int num_k_tiles = (shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
    const int num_q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const TileOfHead where =
        tile_of_block(blockIdx.x, num_k_tiles, shape.num_heads_kv, shape.batch, arguments.schedule);
    const int k_start = where.tile * BLOCK_K;
    const float scale = static_cast<float>(arguments.scale);
    TilePair at{{shape.seqlen_q, shape.seqlen_k}, 0, k_start, scale, scale * LOG2_E};
    const QueryTiles tiles = at.mask.query_tiles(k_start, BLOCK_Q, BLOCK_K);
    const Strides qs = arguments.q_stride, dos = arguments.dout_stride;

    // Starts the copies of the next query tile, one group: the tiles [first, end) of the group's first
    // head, then of its second, and so on. `row`: where its lse and delta stand.
    const int first_head = where.head * group_size, tiles_of_head = tiles.end - tiles.first;
    const i64 first_row = static_cast<i64>(tiles.first) * BLOCK_Q;
    const u16* q = thread_source(
        arguments.q, where.batch * qs.batch + first_head * qs.head + first_row * qs.token, qs.token);
    const u16* dout = thread_source(
        arguments.dout, where.batch * dos.batch + first_head * dos.head + first_row * dos.token, dos.token);
    i64 row = (static_cast<i64>(where.batch) * shape.num_heads_q + first_head) * shape.seqlen_q + first_row;
    int loads_left = tiles_of_head * group_size, next_tile = tiles.first;
    const auto load_queries = [&](int stage) {
        if (loads_left-- <= 0) return;
        const int num_rows = shape.seqlen_q - next_tile * BLOCK_Q;
        load_tile<BLOCK_Q, HEAD_DIM, THREADS, missing(true)>(
            shared_address(&shared.q[stage]), q, qs.token, num_rows, shape.head_dim);
        load_tile<BLOCK_Q, HEAD_DIM_V, THREADS, missing(true)>(
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
        if (++next_tile == tiles.end) { next_tile = tiles.first; tiles_on -= tiles_of_head; heads_on = 1; }
        q += tiles_on * (BLOCK_Q * qs.token) + heads_on * qs.head;
        dout += tiles_on * (BLOCK_Q * dos.token) + heads_on * dos.head;
        row += tiles_on * BLOCK_Q + heads_on * shape.seqlen_q;
    };

    KeyGrid::Fragments dk;
    ValueGrid::Fragments dv;
    set_zero(dk);
    set_zero(dv);

    const int num_rows = shape.seqlen_k - k_start;
    {
        const Strides ks = arguments.k_stride, vs = arguments.v_stride;
        const u16* k = thread_source(
            arguments.k, where.batch * ks.batch + where.head * ks.head + k_start * ks.token, ks.token);
        const u16* v = thread_source(
            arguments.v, where.batch * vs.batch + where.head * vs.head + k_start * vs.token, vs.token);
        load_tile<BLOCK_K, HEAD_DIM, THREADS, missing(true)>(k_tile, k, ks.token, num_rows, shape.head_dim);
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS, missing(true)>(v_tile, v, vs.token, num_rows, shape.head_dim_v);
    }

    load_queries(0);
    cp_async_wait<0>();
    const bool k_nonfinite = __syncthreads_or(loaded_nonfinite<Element, BLOCK_K, HEAD_DIM, THREADS>(k_tile));

    // One query tile: its Q and dO are on their way to `stage`, the other stage's place is free once all
    // warps are past the first barrier.
    int stage = 0;
    const auto step = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const u32 q_tile = shared_address(&shared.q[stage]), dout_tile = shared_address(&shared.dout[stage]);
        at.q_start = tile * BLOCK_Q;
        cp_async_wait<0>();
        bool nonfinite = false;                             // in Q or dO
        if constexpr (MASKED)
            nonfinite = __syncthreads_or(loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM, THREADS>(q_tile)
                                         || loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM_V, THREADS>(dout_tile));
        else
            __syncthreads();
        if (NUM_STAGES == 2) load_queries(stage ^ 1);

        Scores p, ds;
        set_zero(p);
        product<Element, HEAD_DIM / 16>(
            p, OperandA<BLOCK_Q, Stored::AS_NAMED, ScoreGrid::M_TILES>(q_tile, ScoreGrid::first_row()),
            OperandB<BLOCK_K, Stored::TRANSPOSED, ScoreGrid::N_TILES / 2>(k_tile, ScoreGrid::first_column()));
        probabilities(p, shared_address(&shared.lse[stage]), at, shape.seqlen_q - at.q_start);
        if constexpr (MASKED) apply_mask(p, at);
        store_fragments<Element, BLOCK_Q>(p_tile, p, ScoreGrid::first_row(), ScoreGrid::first_column());

        set_zero(ds);
        product<Element, HEAD_DIM_V / 16>(
            ds, OperandA<BLOCK_Q, Stored::AS_NAMED, ScoreGrid::M_TILES>(dout_tile, ScoreGrid::first_row()),
            OperandB<BLOCK_K, Stored::TRANSPOSED, ScoreGrid::N_TILES / 2>(v_tile, ScoreGrid::first_column()));
        score_gradients(ds, p, shared_address(&shared.delta[stage]));
        if constexpr (MASKED) apply_mask(ds, at);
        store_fragments<Element, BLOCK_Q>(ds_tile, ds, ScoreGrid::first_row(), ScoreGrid::first_column());
        __syncthreads();

        gradient_product<ValueGrid, false, BLOCK_Q / 16, BLOCK_Q, MASKED>(dv, p_tile, dout_tile, at, nonfinite);
        QueryGrid::Fragments dq;
        set_zero(dq);
        gradient_product<QueryGrid, true, BLOCK_K / 16, BLOCK_K, MASKED>(dq, ds_tile, k_tile, at, k_nonfinite);
        const i64 pair = static_cast<i64>(where.batch) * shape.num_heads_q + head;
        add_dq(dq, dq_sum_tile(arguments.dq_sum, pair, num_q_tiles, tile),
               static_cast<int*>(arguments.turns) + pair * num_q_tiles + tile, where.tile);
        gradient_product<KeyGrid, false, BLOCK_Q / 16, BLOCK_Q, MASKED>(dk, ds_tile, q_tile, at, nonfinite);

        if (NUM_STAGES == 1) {
            __syncthreads();
            load_queries(stage);
        } else {
            stage ^= 1;
        }
    };

    for (int head = first_head; head < first_head + group_size; ++head) {
        int tile = tiles.first;
        for (; tile < tiles.first_full; ++tile) step(Bool<true>{}, head, tile);
        for (; tile < tiles.end; ++tile) step(Bool<false>{}, head, tile);
    }

    // Epilogue: dK and dV leave through the places of K and V, once nobody reads those any more.
    __syncthreads();
    store_gradient<KeyGrid, HEAD_DIM>(dk, scale, k_tile, arguments.dk, arguments.dk_stride, where,
                                      num_rows, shape.head_dim);
    store_gradient<ValueGrid, HEAD_DIM_V>(dv, 1.0f, v_tile, arguments.dv, arguments.dv_stride, where,
                                          num_rows, shape.head_dim_v);
}
