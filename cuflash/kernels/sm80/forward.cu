// Forward attention for 16-bit types by mma.sync, sm_80 and newer; float16 on sm_75, too.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-2, Alg. 1 (arXiv:2307.08691): a block computes BLOCK_Q queries of one head. It
// visits the key tiles that they see from the last to the first and keeps, for each row, the
// running maximum m of S, the sum l of P = exp(scale (S - m)) and the unnormalised acc = P V. The
// partly masked tiles come first; the loop over the others has no mask code.
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, longest first (scheduler.cuh).
// Block: NUM_WARPS warps, SCORE_WARPS_Q of them along the queries. With fewer than all, for wide
// heads, several share their rows: each has some of the keys of S and of the columns of O.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q, BLOCKS_PER_SM,
// SHARED_BYTES; RUN_TILES (long_sums.cuh); HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up
// to multiples of 32, of wide heads 64; PADDED, whether rounding changed one of them;
// NEGATE_SCORES, whether scale < 0 and scores are LINEAR (score_mod.cuh); Arguments and the options
// (docs/guide/options.md).
// Shared memory, in bytes, columns rounded up to multiples of 64 (smem.cuh):
//     weights     BLOCK_Q * BLOCK_K * 2                       P, if warps share rows
//     rows        BLOCK_Q * 4 for each of them                maxima; sums in the epilogue
//     q_then_out  BLOCK_Q * max(HEAD_DIM, HEAD_DIM_V) * 2     Q; O in the epilogue
//     k           BLOCK_K * HEAD_DIM * 2
//     v           BLOCK_K * HEAD_DIM_V * 2
// The next K loads while this V is used, and V loads while K is used: two barriers per iteration,
// and a third for P if warps share rows.
//
// Slow on Hopper, whose wgmma is about twice as fast, and for few queries with many keys: one block
// per query tile, and keys are not split among blocks.
#include "common/long_sums.cuh"
#include "common/query_tile.cuh"
#include "sm80/forward_epilogue.cuh"
#include "sm80/forward_softmax.cuh"
#include "sm80/row_exchange.cuh"

struct SharedPlan : RowExchange<(WARPS_ACROSS > 1)> {
    SmemTile<BLOCK_Q, (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V)> q_then_out;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

constexpr bool ANY_MASKED = WINDOW || PAIRWISE;             // any tile may be partly masked

// Loads the tiles of K and V from the last to the first, each as one cp.async group.
struct KeyLoader {
    const Shape& shape;
    u32 k_smem, v_smem;
    i64 k_stride, v_stride;
    const u16 *k, *v;                                       // this thread's next chunk
    int last_tile;

    // Tiles are loaded from the last to the first: each call moves the pointer back by one tile,
    // except with SKIPS_TILES. RAGGED: the tile may reach past the last key.
    template <bool RAGGED> __device__ __forceinline__ void load_k(int tile) {
        load_tile<BLOCK_K, HEAD_DIM, THREADS, missing<PADDED>(RAGGED)>(
            k_smem, source(k, tile, k_stride), k_stride, shape.seqlen_k - tile * BLOCK_K,
            shape.head_dim);
        cp_async_commit();
        if (!SKIPS_TILES) k -= BLOCK_K * k_stride;
    }
    template <bool RAGGED> __device__ __forceinline__ void load_v(int tile) {
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS, missing<PADDED>(RAGGED)>(
            v_smem, source(v, tile, v_stride), v_stride, shape.seqlen_k - tile * BLOCK_K,
            shape.head_dim_v);
        cp_async_commit();
        if (!SKIPS_TILES) v -= BLOCK_K * v_stride;
    }

private:
    __device__ __forceinline__ const u16* source(const u16* next, int tile, i64 stride) const {
        if constexpr (SKIPS_TILES)                          // tiles may be skipped
            return next - (last_tile - tile) * (BLOCK_K * stride);
        else
            return next;
    }
};

// What the thread loads of the keys or values from first_key on.
__device__ __forceinline__ const u16* key_source(
    const void* array, Strides stride, int batch, int kv_head, i64 first_key) {
    return thread_source<LoadShare<BLOCK_K, THREADS>>(
        array, batch * stride.batch + kv_head * stride.head + first_key * stride.token,
        stride.token);
}

// Starts the loads of the block's queries.
__device__ __forceinline__ void load_queries(
    u32 q_smem, const ForwardArguments& arrays, TileCoord coord, int q_start) {
    const Strides qs = arrays.q_stride;
    const u16* q = thread_source(
        arrays.q, coord.batch * qs.batch + coord.head * qs.head + q_start * qs.token, qs.token);
    load_tile<BLOCK_Q, HEAD_DIM, THREADS, missing<PADDED>(true)>(
        q_smem, q, qs.token, arrays.shape.seqlen_q - q_start, arrays.shape.head_dim);
}

// acc in two levels.
struct OutputSums {
    static constexpr int COUNT = M_TILES * O_TILES * 4, ROWS = M_TILES * 2;
    LongSums<COUNT, ROWS> sums;
    float local[decltype(sums)::SIZE];

    static __device__ __forceinline__ auto elements(Output& acc) {
        return [&acc](int i) -> float& {
            return acc[i / (O_TILES * 4)][i / 4 % O_TILES][i % 4];
        };
    }
    static __device__ __forceinline__ void scale_maxima(
        float (&max_scaled)[ROWS], const SoftmaxState& softmax, float scale_log2) {
        #pragma unroll
        for (int row = 0; row < ROWS; ++row)
            max_scaled[row] = __fmul_rn(softmax.m[row / 2][row % 2], scale_log2);
    }

    // acc = 0, m = -inf, l = 0.
    __device__ __forceinline__ OutputSums(Output& acc, SoftmaxState& softmax) {
        sums.hold_in(local);
        set_zero(acc);
        reset(softmax);
    }
    // Between runs.
    __device__ __forceinline__ void end_run(
        Output& acc, const SoftmaxState& softmax, float scale_log2) {
        float max_scaled[ROWS];
        scale_maxima(max_scaled, softmax, scale_log2);
        sums.add(elements(acc), max_scaled);
        set_zero(acc);
    }
    // After the last.
    __device__ __forceinline__ void finish(
        Output& acc, const SoftmaxState& softmax, float scale_log2) {
        float max_scaled[ROWS];
        scale_maxima(max_scaled, softmax, scale_log2);
        sums.finish(elements(acc), max_scaled);
    }
};

// Epilogue: stores O, through the tile of Q, and lse. lane_row: the lane's first row in the tile.
// lacks_nonfinite: in partly masked tiles a NaN or an infinity of V was replaced by 0; its terms
// are added to the stored O of the rows that see it.
__device__ __forceinline__ void finish(
    const Arguments& call_args, SharedPlan& shared, const QueryTile& query_tile, int lane_row,
    Output& acc, SoftmaxState& softmax, bool lacks_nonfinite) {
    shared.share_sums(softmax);
    TileCoord coord = query_tile_of_block<true>(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    store(args, coord, shared_address(&shared.q_then_out), acc, softmax);
    if (!lacks_nonfinite) return;
    // All warps are past the last iteration's second barrier: the tile of K is free.
    float* row_max = reinterpret_cast<float*>(&shared.k);
    share_maxima(row_max, softmax, lane_row);
    add_nonfinite_terms(args, coord, query_tile, row_max);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_sm80(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const u32 q_smem = shared_address(&shared.q_then_out);
    const u32 k_smem = shared_address(&shared.k), v_smem = shared_address(&shared.v);

    // Prologue: find the tile; start loading Q and the last K.
    TileCoord coord = query_tile_of_block<true>(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int q_start = coord.tile * BLOCK_Q;
    const int kv_head = coord.head / (shape.num_heads_q / shape.num_heads_kv);
    const Strides ks = arrays.k_stride, vs = arrays.v_stride;
    const int row_warp = WARPS_ACROSS == 1 ? threadIdx.x / 32 : threadIdx.x / 32 % SCORE_WARPS_Q;
    const int lane_query = q_start + row_warp * WARP_ROWS + threadIdx.x % 32 / 4;
    const QueryTile query_tile(args, coord, lane_query);
    const KeyTiles tiles = query_tile.mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);

    SoftmaxState softmax;
    Output acc;
    OutputSums sums(acc, softmax);

    const i64 last_key = static_cast<i64>(tiles.num_visited - 1) * BLOCK_K;
    KeyLoader loader{.shape = shape, .k_smem = k_smem, .v_smem = v_smem,
        .k_stride = ks.token, .v_stride = vs.token,
        .k = key_source(arrays.k, ks, coord.batch, kv_head, last_key),
        .v = key_source(arrays.v, vs, coord.batch, kv_head, last_key),
        .last_tile = tiles.num_visited - 1};
    const PairMask& pair_mask = query_tile.pair_mask;
    int tile = pair_mask.key_tile_before(coord.tile, tiles.num_visited, tiles.first), next = 0;
    if (tile >= tiles.first) {
        load_queries(q_smem, arrays, coord, q_start);
        loader.load_k<true>(tile);
    }

    // Main loop, one key tile per iteration. The load of its K has been started; V's tile is free
    // once all warps have passed the first barrier, K's once they have passed the second.
    bool lacks_nonfinite = false;                           // the same in all threads
    const auto iterate = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        Scores s;
        cp_async_wait<0>();
        __syncthreads();
        loader.load_v<MASKED>(tile);
        score_gemm(s, q_smem, k_smem);
        if constexpr (!LINEAR) apply_score_mod(s, query_tile, tile * BLOCK_K);
        if constexpr (MASKED) apply_mask(s, query_tile, tile * BLOCK_K);
        shared.share_maxima(s);
        cp_async_wait<0>();
        bool nonfinite = false;                             // in V, the same in all threads
        if constexpr (MASKED)
            nonfinite = __syncthreads_or(
                loaded_nonfinite<Element, BLOCK_K, HEAD_DIM_V, THREADS>(v_smem));
        else
            __syncthreads();
        next = pair_mask.key_tile_before(q_start / BLOCK_Q, tile, tiles.first);
        if (next >= tiles.first) loader.load_k<false>(next);
        shared.softmax_step(s, softmax, acc, query_tile.scale_log2);
        if constexpr (DROPOUT) apply_dropout(s, query_tile, tile * BLOCK_K);
        shared.template accumulate<MASKED>(acc, s, v_smem, nonfinite);
        if constexpr (MASKED) lacks_nonfinite |= nonfinite;
    };

    if constexpr (!ANY_MASKED)
        for (; tile >= tiles.num_full; --tile) iterate(Bool<true>{});
    const int first = ANY_MASKED ? tiles.first : 0;
    for (;; sums.end_run(acc, softmax, query_tile.scale_log2)) {
        const int last = last_of_run(tile, first);
        for (; tile >= last; tile = ANY_MASKED ? next : tile - 1)
            if (!ANY_MASKED || (tiles.full(tile) && pair_mask.sees_all(q_start / BLOCK_Q, tile)))
                iterate(Bool<false>{});
            else
                iterate(Bool<true>{});
        if (!RUN_TILES || tile < first) break;
    }
    sums.finish(acc, softmax, query_tile.scale_log2);
    finish(call_args, shared, query_tile, lane_query - q_start, acc, softmax, lacks_nonfinite);
}
