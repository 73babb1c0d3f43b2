// Backward attention for 16-bit types by mma.sync, from sm_80 on (float16: sm_75): dK, dV and the
// float sums of dQ.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-2, Alg. 2 (arXiv:2307.08691): a block computes BLOCK_K keys of one key head. It
// visits the query tiles that see them, of every query head of the group, and keeps dK and dV in
// registers. It adds its part of dQ to float sums in global memory, which finish/dq.cu scales and
// rounds. delta = rowsum(dO * O) - dlse comes from prepare/delta.cu.
//
// Grid: tiles of BLOCK_K keys of all (batch, key head) pairs (scheduler.cuh), the first tiles
// first: if CAUSAL, most queries see those.
// Block: NUM_WARPS warps, in the grids of backward_scores.cuh.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, GRADIENT_WARPS_K,
// NUM_STAGES, BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up
// to multiples of 32, of wide heads 64; PADDED, whether that changed one of them; LOADS_IN_TURN: dO
// and Q load as soon as each is no longer used, instead of together after all matmuls; DS_COLUMN:
// where dS stands in P's tile, 0: it has its own; DETERMINISTIC: the blocks of one head add to a
// query tile's dQ in the order of their key tiles; Arguments and the options
// (docs/guide/options.md), with which scale S stands for the score of score_mod.cuh and dS for the
// gradient by scale S. Shared memory, in bytes, columns rounded up to multiples of 64 (smem.cuh):
//     k           BLOCK_K * HEAD_DIM * 2                      dK in the epilogue
//     v           BLOCK_K * HEAD_DIM_V * 2                    dV in the epilogue
//     q           NUM_STAGES * BLOCK_Q * HEAD_DIM * 2
//     dout        NUM_STAGES * BLOCK_Q * HEAD_DIM_V * 2
//     p_and_ds    BLOCK_Q * BLOCK_K * 2 each                  exchanged between warps
//     lse, delta  NUM_STAGES * BLOCK_Q * 4 each
// Barriers an iteration: one when Q and dO have arrived, one when P and dS are written and, with
// one stage, a third before the next load, or, if they load in turn, before each of two.
//
// Bad at: Hopper, whose wgmma is about twice as fast; few keys with many queries (one block a key
// tile, queries are not split).
#include "common/key_tile.cuh"
#include "sm80/backward_gradients.cuh"
#include "sm80/backward_scores.cuh"

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k;                          // then dK
    SmemTile<BLOCK_K, HEAD_DIM_V> v;                        // then dV
    SmemTile<BLOCK_Q, HEAD_DIM> q[NUM_STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[NUM_STAGES];
    SmemTile<BLOCK_Q, DS_COLUMN + BLOCK_K> p_and_ds[DS_COLUMN == 0 ? 2 : 1];
    alignas(1024) float lse[NUM_STAGES][BLOCK_Q];
    float delta[NUM_STAGES][BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
static_assert(!LOADS_IN_TURN || NUM_STAGES == 1, "the other stage loads a whole iteration ahead");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "the main loop knows one or two stages");

// The tiles of P and dS; dS may stand in P's, beside it.
__device__ __forceinline__ u32 p_tile(SharedPlan& shared) {
    return shared_address(&shared.p_and_ds[0]);
}
__device__ __forceinline__ u32 ds_tile(SharedPlan& shared) {
    return shared_address(&shared.p_and_ds[DS_COLUMN == 0 ? 1 : 0]);
}

// Loads Q, dO, lse and delta of one query tile after another: the tiles of the group's first head,
// then those of its second head, and so on. Each load is one cp.async group.
struct QueryLoader {
    const Arguments& args;
    const BackwardArguments& arrays;
    const BackwardOrder& order;
    Strides q_stride, dout_stride;
    int tiles_of_head;
    const u16 *q, *dout;                                    // this thread's first chunk
    i64 row;                                                // in lse and delta
    int loads_left;                                         // tiles; with SKIPS_TILES heads
    int next_tile;

    __device__ __forceinline__ QueryLoader(
        const Arguments& args, const BackwardOrder& order, TileCoord coord, int first_head,
        int group_size)
        : args(args), arrays(arrays_of(args)), order(order), q_stride(arrays.q_stride),
          dout_stride(arrays.dout_stride), tiles_of_head(order.tiles.end - order.tiles.first) {
        const Strides &qs = q_stride, &dos = dout_stride;
        const i64 first_row = static_cast<i64>(order.first) * BLOCK_Q;
        q = thread_source<LoadShare<BLOCK_Q, THREADS>>(
            arrays.q, coord.batch * qs.batch + first_head * qs.head + first_row * qs.token,
            qs.token);
        dout = thread_source<LoadShare<BLOCK_Q, THREADS>>(
            arrays.dout, coord.batch * dos.batch + first_head * dos.head + first_row * dos.token,
            dos.token);
        row = (static_cast<i64>(coord.batch) * arrays.shape.num_heads_q + first_head)
            * rows_of_head(args) + first_row;
        loads_left = SKIPS_TILES ? (order.has(order.first) ? group_size : 0)
                              : tiles_of_head * group_size;
        next_tile = order.first;
    }

    // Starts the next load, to `stage`, unless all tiles are loaded.
    __device__ __forceinline__ void load(SharedPlan& shared, int stage) {
        if (SKIPS_TILES ? loads_left <= 0 : loads_left-- <= 0) return;
        const int num_rows = arrays.shape.seqlen_q - next_tile * BLOCK_Q;
        copy_q(shared, stage, num_rows);
        copy_dout(shared, stage, num_rows);
        cp_async_commit();
        advance();
    }

    // The same in two steps, to stage 0: what is used with dO, then Q.
    __device__ __forceinline__ void load_dout(SharedPlan& shared) {
        if (loads_left <= 0) return;
        copy_dout(shared, 0, arrays.shape.seqlen_q - next_tile * BLOCK_Q);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_q(SharedPlan& shared) {
        if (loads_left <= 0) return;
        copy_q(shared, 0, arrays.shape.seqlen_q - next_tile * BLOCK_Q);
        cp_async_commit();
        if (!SKIPS_TILES) --loads_left;
        advance();
    }

private:
    __device__ __forceinline__ void copy_q(SharedPlan& shared, int stage, int num_rows) {
        load_tile<BLOCK_Q, HEAD_DIM, THREADS, missing<PADDED>(true)>(
            shared_address(&shared.q[stage]), q, q_stride.token, num_rows, arrays.shape.head_dim);
    }
    // With lse and delta.
    __device__ __forceinline__ void copy_dout(SharedPlan& shared, int stage, int num_rows) {
        load_tile<BLOCK_Q, HEAD_DIM_V, THREADS, missing<PADDED>(true)>(
            shared_address(&shared.dout[stage]), dout, dout_stride.token, num_rows,
            arrays.shape.head_dim_v);
        for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
            const int bytes = i < num_rows ? 4 : 0;
            cp_async_4(shared_address(&shared.lse[stage][i]),
                       static_cast<const float*>(arrays.lse) + row + i, bytes);
            cp_async_4(shared_address(&shared.delta[stage][i]),
                       static_cast<const float*>(arrays.delta) + row + i, bytes);
        }
    }
    // To the next tile that is visited, of this head or the next.
    __device__ __forceinline__ void advance() {
        int tile_step = 1, head_step = 0;
        if constexpr (SKIPS_TILES || LAST_QUERIES_FIRST) {
            const int loaded = next_tile;
            next_tile = order.after(loaded);
            head_step = order.has(next_tile) ? 0 : 1;
            if (head_step) next_tile = order.first;
            if (SKIPS_TILES) loads_left -= head_step;
            tile_step = next_tile - loaded;
        } else if (++next_tile == order.tiles.end) {
            next_tile = order.first;
            tile_step -= tiles_of_head;
            head_step = 1;
        }
        q += tile_step * (BLOCK_Q * q_stride.token) + head_step * q_stride.head;
        dout += tile_step * (BLOCK_Q * dout_stride.token) + head_step * dout_stride.head;
        row += tile_step * BLOCK_Q + head_step * rows_of_head(args);
    }
};

// Starts the loads of the block's K and V.
__device__ __forceinline__ void load_keys(
    SharedPlan& shared, const BackwardArguments& arrays, TileCoord coord, int k_start,
    int num_rows) {
    const Strides ks = arrays.k_stride, vs = arrays.v_stride;
    const u16* k = thread_source<LoadShare<BLOCK_K, THREADS>>(
        arrays.k, coord.batch * ks.batch + coord.head * ks.head + k_start * ks.token, ks.token);
    const u16* v = thread_source<LoadShare<BLOCK_K, THREADS>>(
        arrays.v, coord.batch * vs.batch + coord.head * vs.head + k_start * vs.token, vs.token);
    load_tile<BLOCK_K, HEAD_DIM, THREADS, missing<PADDED>(true)>(
        shared_address(&shared.k), k, ks.token, num_rows, arrays.shape.head_dim);
    load_tile<BLOCK_K, HEAD_DIM_V, THREADS, missing<PADDED>(true)>(
        shared_address(&shared.v), v, vs.token, num_rows, arrays.shape.head_dim_v);
}

// Loads K, V and the first query tile and waits for them. The result, the same in all threads:
// whether K has a NaN or an infinity.
__device__ __forceinline__ bool load_first_tiles(
    SharedPlan& shared, QueryLoader& loader, TileCoord coord, int k_start, int num_rows) {
    load_keys(shared, loader.arrays, coord, k_start, num_rows);
    if (WINDOW || SKIPS_TILES || PACKED) cp_async_commit();    // there may be no query tile
    loader.load(shared, 0);
    cp_async_wait<0>();
    const bool k_nonfinite = __syncthreads_or(
        loaded_nonfinite<Element, BLOCK_K, HEAD_DIM, THREADS>(shared_address(&shared.k)));
    return k_nonfinite;
}

// Waits for Q and dO of a query tile. The result, the same in all threads: whether a partly masked
// tile has a NaN or an infinity in Q or dO.
template <bool MASKED>
__device__ __forceinline__ bool wait_for_queries(u32 q_smem, u32 dout_smem) {
    cp_async_wait<0>();
    if constexpr (MASKED)
        return __syncthreads_or(
            loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM, THREADS>(q_smem)
            || loaded_nonfinite<Element, BLOCK_Q, HEAD_DIM_V, THREADS>(dout_smem));
    __syncthreads();
    return false;
}

// S, P, dP and dS of a tile. P (for dV) and dS go to shared memory. No barrier inside.
template <bool MASKED>
__device__ __forceinline__ void compute_p_and_ds(
    SharedPlan& shared, const ScoreTile& score_tile, int stage) {
    if (SCORE_WARPS < NUM_WARPS && threadIdx.x / 32 >= SCORE_WARPS) return;
    Scores s;                                               // S, then P
    score_gemm<HEAD_DIM>(s, shared_address(&shared.q[stage]), shared_address(&shared.k));
    ScoreDerivatives derivatives;
    probabilities(s, derivatives, shared_address(&shared.lse[stage]), score_tile);
    if constexpr (MASKED) apply_mask(s, score_tile);
    PackedScores p;
    KeptBits kept;
    if constexpr (DROPOUT) {                                // P Z for dV; P for dS
        Scores dropped;
        copy(dropped, s);
        find_kept(kept, score_tile);
        apply_dropout(dropped, kept, score_tile);
        pack_fragments<Element>(p, dropped);
    } else {
        pack_fragments<Element>(p, s);
    }
    store_scores(p_tile(shared), p);
    if constexpr (BENDS && !SUMS_SCORES) multiply(s, derivatives.by_product);
    if constexpr (BENDS || DROPOUT) pack_fragments<Element>(p, s);

    Scores ds;                                              // dP, then dS
    score_gemm<HEAD_DIM_V>(ds, shared_address(&shared.dout[stage]), shared_address(&shared.v));
    if constexpr (DROPOUT) apply_dropout(ds, kept, score_tile);
    score_gradients(ds, p, shared_address(&shared.delta[stage]));
    if constexpr (SUMS_SCORES) {                            // dS without `derivatives`
        if constexpr (MASKED) apply_mask(ds, score_tile);
        add_score_gradients(ds, derivatives, score_tile);
        if constexpr (BENDS) multiply(ds, derivatives.by_product);
    }
    if constexpr (MASKED) apply_mask(ds, score_tile);
    pack_fragments<Element>(p, ds);
    store_scores(ds_tile(shared), p, DS_COLUMN);
}

// dK and dV leave through the tiles of K and V, once no warp reads those any more.
__device__ __forceinline__ void store_gradients(
    SharedPlan& shared, const BackwardArguments& arrays, TileCoord coord, int num_rows,
    KeyGrid::Fragments& dk, ValueGrid::Fragments& dv, float scale) {
    __syncthreads();
    store_gradient<KeyGrid, HEAD_DIM>(
        dk, scale, shared_address(&shared.k), arrays.dk, arrays.dk_stride, coord, num_rows,
        arrays.shape.head_dim);
    store_gradient<ValueGrid, HEAD_DIM_V>(
        dv, 1.0f, shared_address(&shared.v), arrays.dv, arrays.dv_stride, coord, num_rows,
        arrays.shape.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_sm80(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const u32 k_smem = shared_address(&shared.k);
    const u32 p_smem = p_tile(shared), ds_smem = ds_tile(shared);

    // Prologue: find the key tile, and the query tiles that see it.
    const Shape& call_shape = arrays_of(call_args).shape;
    const int num_k_tiles = num_key_tiles(call_args, BLOCK_K);
    const int num_q_tiles = num_query_tiles(call_args, BLOCK_Q);
    const int group_size = call_shape.num_heads_q / call_shape.num_heads_kv;
    TileCoord coord = key_tile_of_block(call_args, num_k_tiles, shared_bytes);
    const bool descends = order_key_tile<IN_SECTIONS>(call_args, num_k_tiles, coord);
    const auto sequence = sequence_of_block<true>(call_args, coord.tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q, BLOCK_Q * HEAD_DIM);
    const BackwardArguments& arrays = arrays_of(args);
    const float scale = static_cast<float>(arrays.scale);
    const int k_start = coord.tile * BLOCK_K;
    ScoreTile score_tile(args, coord.batch, coord.tile);
    const QueryTiles tiles = score_tile.mask.query_tiles(k_start, BLOCK_Q, BLOCK_K);
    score_tile.set_group(coord.head * group_size);
    const BackwardOrder order(score_tile.pair_mask, tiles, coord.tile, descends);
    const int first_head = coord.head * group_size;
    QueryLoader loader(args, order, coord, first_head, group_size);
    KeyGrid::Fragments dk;
    ValueGrid::Fragments dv;
    set_zero(dk);
    set_zero(dv);

    const int num_rows = arrays.shape.seqlen_k - k_start;
    const bool k_nonfinite = load_first_tiles(shared, loader, coord, k_start, num_rows);

    // Main loop, one query tile per iteration. Its Q and dO are on their way to `stage`; the other
    // stage is free once all warps are past the first barrier.
    int stage = 0;
    BackwardSemaphore dq_semaphore{descends};
    bool lacks_nonfinite = false;                           // the same in all threads
    const auto iterate = [&](auto masked, int head, int tile) {
        constexpr bool MASKED = masked.value;
        const u32 q_smem = shared_address(&shared.q[stage]);
        const u32 dout_smem = shared_address(&shared.dout[stage]);
        score_tile.q_start = tile * BLOCK_Q;
        const bool nonfinite = wait_for_queries<MASKED>(q_smem, dout_smem);
        dq_semaphore.release();
        if constexpr (MASKED) lacks_nonfinite |= nonfinite || k_nonfinite;
        if (NUM_STAGES == 2) loader.load(shared, stage ^ 1);

        compute_p_and_ds<MASKED>(shared, score_tile, stage);
        __syncthreads();

        add_dv<MASKED>(dv, p_smem, dout_smem, nonfinite);
        if constexpr (LOADS_IN_TURN) {
            __syncthreads();
            loader.load_dout(shared);
            add_dk<MASKED>(dk, ds_smem, q_smem, nonfinite);
            __syncthreads();
            loader.load_q(shared);
        }
        add_dq<MASKED>(dq_semaphore, arrays, score_tile, order, coord, head, tile, num_q_tiles,
                       ds_smem, k_smem, k_nonfinite);
        if constexpr (!LOADS_IN_TURN) add_dk<MASKED>(dk, ds_smem, q_smem, nonfinite);
        if (NUM_STAGES == 2) stage ^= 1;
        if (NUM_STAGES == 1 && !LOADS_IN_TURN) {
            __syncthreads();
            loader.load(shared, stage);
        }
    };

    for (int head = first_head; head < first_head + group_size; ++head) {
        score_tile.set_head(args, coord.batch, head);
        for (int tile = order.first; order.has(tile); tile = order.after(tile))
            if (score_tile.full(tiles, tile)) iterate(Bool<false>{}, head, tile);
            else iterate(Bool<true>{}, head, tile);
    }

    // Epilogue.
    dq_semaphore.finish();
    store_gradients(shared, arrays, coord, num_rows, dk, dv, scale);
    if (lacks_nonfinite) add_nonfinite_terms(args, coord, score_tile, tiles);
}
