// Forward attention and its derivative along directions, for 16-bit types by mma.sync, sm_80 and
// newer.
//
//     O = P V,  b = rowsum(P * W) = lse',  O' = (P * W) V + P V' - b O
//
// with W, the tangent of the scores, from score/tangents.cuh. As sm80/forward.cu: online softmax
// over the key tiles that a block's queries see, from the last to the first, those that are partly
// masked apart. The sums b = rowsum(P * (W - r)) and acc_dot = (P * (W - r)) V + P V' are rescaled
// as l and acc = P V are. r is a reference of W in its row (jvp_softmax.cuh).
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs, as in sm80/forward.cu, times groups of
// directions: blockIdx.x = tile * groups + group. A block has DIRECTIONS of them, for which it
// computes S, P and O once (score/directions.cuh); that of the first one stores O and lse.
// Block: NUM_WARPS warps, SCORE_WARPS_Q of them along the queries. With fewer than all, for wide
// heads, several share their rows: each has some of the columns that S and W sum over, and some of
// those of O and O' (score_parts.cuh).
//
// Constants: those of sm80/forward.cu; SCORE_PARTS: how many warps share rows; DIRECTIONS,
// FIRST_DIRECTION, LAST_DIRECTION, READS_OUT; Q_DOT to MOD_DOT: what moves.
// Shared memory, in bytes, columns rounded up to multiples of 64 (smem.cuh):
//     parts                           BLOCK_Q * BLOCK_K * 4 each  S, W: SCORE_PARTS each, if > 1
//     q_then_out, q_dot_then_out_dot  BLOCK_Q * max(HEAD_DIM, HEAD_DIM_V) * 2 each
//     k, k_dot                        BLOCK_K * HEAD_DIM * 2 each
//     v, v_dot                        BLOCK_K * HEAD_DIM_V * 2 each
// with a *_dot, and a W, for each direction. The next K and K' load while V and V' are used, and V
// and V' while K and K' are.
//
// Bad at: wide heads, of whose tiles few rows fit, and of which all warps of a row compute P.
#include "common/query_tile.cuh"
#include "sm80/jvp_epilogue.cuh"
#include "sm80/row_loads.cuh"

constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;

struct SharedPlan : ScoreParts<1 + DIRECTIONS> {
    SmemTile<BLOCK_Q, WIDEST> q_then_out, q_dot_then_out_dot[DIRECTIONS];
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot[DIRECTIONS];
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot[DIRECTIONS];
};
constexpr int Q_BYTES = sizeof(SharedPlan::q_then_out), K_BYTES = sizeof(SharedPlan::k);
constexpr int V_BYTES = sizeof(SharedPlan::v);              // from one direction's tile to the next
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Loads tiles of one head's keys and values and of their tangents, if they move; K and K' as one
// cp.async group, V and V' as another. k_dot, v_dot: of the first direction.
struct KeyLoader {
    const Shape& shape;
    u32 k_smem, k_dot_smem, v_smem, v_dot_smem;
    Rows<BLOCK_K> k, k_dot, v, v_dot;
    i64 k_dot_direction, v_dot_direction;                   // strides

    __device__ __forceinline__ KeyLoader(
        const Arguments& args, SharedPlan& shared, int direction, int batch, int head)
        : shape(arrays_of(args).shape), k_smem(shared_address(&shared.k)),
          k_dot_smem(shared_address(&shared.k_dot)), v_smem(shared_address(&shared.v)),
          v_dot_smem(shared_address(&shared.v_dot)),
          k(arrays_of(args).k, arrays_of(args).k_stride, batch, head),
          k_dot(args.k_dot, args.tangents.k_dot, direction, batch, head),
          v(arrays_of(args).v, arrays_of(args).v_stride, batch, head),
          v_dot(args.v_dot, args.tangents.v_dot, direction, batch, head),
          k_dot_direction(args.tangents.k_dot.direction),
          v_dot_direction(args.tangents.v_dot.direction) {}

    template <bool RAGGED> __device__ __forceinline__ void load_k(int tile) const {
        const int start = tile * BLOCK_K, end = shape.seqlen_k, columns = shape.head_dim;
        k.load<HEAD_DIM, RAGGED>(k_smem, start, end, columns);
        #pragma unroll
        for (int n = 0; n < DIRECTIONS; ++n)
            if constexpr (K_DOT)
                k_dot.after(n * k_dot_direction).load<HEAD_DIM, RAGGED>(
                    k_dot_smem + n * K_BYTES, start, end, columns);
        cp_async_commit();
    }
    template <bool RAGGED> __device__ __forceinline__ void load_v(int tile) const {
        const int start = tile * BLOCK_K, end = shape.seqlen_k, columns = shape.head_dim_v;
        v.load<HEAD_DIM_V, RAGGED>(v_smem, start, end, columns);
        #pragma unroll
        for (int n = 0; n < DIRECTIONS; ++n)
            if constexpr (V_DOT)
                v_dot.after(n * v_dot_direction).load<HEAD_DIM_V, RAGGED>(
                    v_dot_smem + n * V_BYTES, start, end, columns);
        cp_async_commit();
    }
    // Whether the thread's own chunks of V and V' contain a NaN or an infinity.
    __device__ __forceinline__ bool nonfinite() const {
        bool found = loaded_nonfinite<Element, BLOCK_K, HEAD_DIM_V, THREADS>(v_smem);
        #pragma unroll
        for (int n = 0; n < DIRECTIONS; ++n)
            if constexpr (V_DOT)
                found |= loaded_nonfinite<Element, BLOCK_K, HEAD_DIM_V, THREADS>(
                    v_dot_smem + n * V_BYTES);
        return found;
    }
};

// Starts the loads of the block's queries and of their tangents.
__device__ __forceinline__ void load_queries(
    u32 q_smem, u32 q_dot_smem, const Arguments& args, TileCoord coord, int direction) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int start = coord.tile * BLOCK_Q;
    Rows<BLOCK_Q>(arrays.q, arrays.q_stride, coord.batch, coord.head)
        .load<HEAD_DIM, true>(q_smem, start, shape.seqlen_q, shape.head_dim);
    #pragma unroll
    for (int n = 0; n < DIRECTIONS; ++n)
        if constexpr (Q_DOT)
            Rows<BLOCK_Q>(args.q_dot, args.tangents.q_dot, direction + n, coord.batch, coord.head)
                .load<HEAD_DIM, true>(
                    q_dot_smem + n * Q_BYTES, start, shape.seqlen_q, shape.head_dim);
}

// The block's tile.
__device__ __forceinline__ TileCoord tile_of_this_block(const Arguments& call_args) {
    return query_tile_of_block<true>(call_args, num_direction_groups(call_args.tangents));
}
// Its first direction.
__device__ __forceinline__ int direction_of_this_block(const Arguments& call_args) {
    const TangentNumbers& tangents = call_args.tangents;
    return first_direction_of(opaque(blockIdx.x) % num_direction_groups(tangents), tangents);
}

// After value_gemms<true>(), by a whole warp.
__device__ __forceinline__ void add_all_nonfinite_terms(
    Output& acc, OutputTangents& acc_dot, const Scores& p, const ScoreTangents& pw,
    const SharedPlan& shared, const QueryTile& query_tile, int k_start) {
    add_nonfinite_terms(acc, p, shared.v.bytes, query_tile, k_start);
    #pragma unroll
    for (int n = 0; n < DIRECTIONS; ++n) {
        if constexpr (SCORES_MOVE)
            add_nonfinite_terms(acc_dot[n], pw[n], shared.v.bytes, query_tile, k_start);
        if constexpr (V_DOT)
            add_nonfinite_terms(acc_dot[n], p, shared.v_dot[n].bytes, query_tile, k_start);
    }
}

// From Q K^T and its tangents to S and W of a tile.
template <bool MASKED>
__device__ __forceinline__ void modify_and_mask(
    Scores& s, ScoreTangents& w, const QueryTile& query_tile,
    const HeadTangent<float>& tangent, int k_start) {
    scores_and_tangents(s, w, query_tile, tangent, k_start);
    if constexpr (MASKED) apply_mask(s, w, query_tile, k_start);
}

// The same, before a barrier and after it: with parts the first publishes the warp's.
template <bool MASKED>
__device__ __forceinline__ void finish_scores(
    const SharedPlan& shared, Scores& s, ScoreTangents& w, const QueryTile& query_tile,
    const HeadTangent<float>& tangent, int k_start) {
    if constexpr (SCORE_PARTS == 1)
        return modify_and_mask<MASKED>(s, w, query_tile, tangent, k_start);
    shared.store_part(0, s);
    #pragma unroll
    for (int n = 0; n < DIRECTIONS; ++n) shared.store_part(1 + n, w[n]);
}
template <bool MASKED>
__device__ __forceinline__ void add_parts(
    const SharedPlan& shared, Scores& s, ScoreTangents& w, const QueryTile& query_tile,
    const HeadTangent<float>& tangent, int k_start) {
    if constexpr (SCORE_PARTS == 1) return;
    shared.add_parts(0, s);
    #pragma unroll
    for (int n = 0; n < DIRECTIONS; ++n) shared.add_parts(1 + n, w[n]);
    modify_and_mask<MASKED>(s, w, query_tile, tangent, k_start);
}

__device__ __forceinline__ void finish(
    const Arguments& call_args, SharedPlan& shared, Output& acc, OutputTangents& acc_dot,
    const SoftmaxState& softmax, const TangentStates& states) {
    TileCoord coord = tile_of_this_block(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const Wanted wanted{arrays_of(call_args).out != nullptr, call_args.out_dot != nullptr};
    store<Q_BYTES>(args, wanted, coord, direction_of_this_block(call_args),
                   shared_address(&shared.q_then_out), shared_address(&shared.q_dot_then_out_dot),
                   acc, acc_dot, softmax, states);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
jvp_sm80(const __grid_constant__ Arguments call_args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const u32 q_smem = shared_address(&shared.q_then_out);
    const u32 q_dot_smem = shared_address(&shared.q_dot_then_out_dot);

    // Prologue: find the tile and the direction; start loading Q and the last K.
    const int direction = direction_of_this_block(call_args);
    TileCoord coord = tile_of_this_block(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const Shape& shape = arrays_of(args).shape;
    const int q_start = coord.tile * BLOCK_Q;
    const int kv_head = coord.head / (shape.num_heads_q / shape.num_heads_kv);
    const int lane_query = q_start + warp_row() + threadIdx.x % 32 / 4;
    const QueryTile query_tile(args, coord, lane_query);
    const HeadTangent<float> tangent(args, direction, coord.batch, coord.head);
    const KeyTiles tiles = query_tile.mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const KeyLoader loader(args, shared, direction, coord.batch, kv_head);

    SoftmaxState softmax;
    TangentStates states;
    Output acc;
    OutputTangents acc_dot;
    set_zero(acc);
    #pragma unroll
    for (int n = 0; n < DIRECTIONS; ++n) set_zero(acc_dot[n]);
    reset(softmax);
    reset(states);

    const PairMask& pair_mask = query_tile.pair_mask;
    int tile = pair_mask.key_tile_before(coord.tile, tiles.num_visited, tiles.first), next = 0;
    if (tile >= tiles.first) {
        load_queries(q_smem, q_dot_smem, args, coord, direction);
        loader.load_k<true>(tile);
    }

    // Main loop, one key tile per iteration, its barriers as in sm80/forward.cu.
    const auto iterate = [&](auto masked) {
        constexpr bool MASKED = masked.value;
        const int k_start = tile * BLOCK_K;
        Scores s;
        ScoreTangents w;
        cp_async_wait<0>();
        __syncthreads();
        loader.load_v<MASKED>(tile);
        score_gemms<Q_BYTES, K_BYTES>(
            s, w, q_smem, q_dot_smem, loader.k_smem, loader.k_dot_smem);
        finish_scores<MASKED>(shared, s, w, query_tile, tangent, k_start);
        cp_async_wait<0>();
        bool nonfinite = false;                             // in V, V', the same in all threads
        if constexpr (MASKED) nonfinite = __syncthreads_or(loader.nonfinite());
        else __syncthreads();
        next = pair_mask.key_tile_before(q_start / BLOCK_Q, tile, tiles.first);
        if (next >= tiles.first) loader.load_k<false>(next);
        add_parts<MASKED>(shared, s, w, query_tile, tangent, k_start);
        tangent_step(s, w, softmax, states, acc, acc_dot, query_tile.scale_log2);
        if constexpr (DROPOUT) apply_dropout(s, w, query_tile, k_start);
        if (MASKED && nonfinite) {
            value_gemms<true, V_BYTES>(acc, acc_dot, s, w, loader.v_smem, loader.v_dot_smem);
            add_all_nonfinite_terms(acc, acc_dot, s, w, shared, query_tile, k_start);
        } else {
            value_gemms<false, V_BYTES>(acc, acc_dot, s, w, loader.v_smem, loader.v_dot_smem);
        }
    };

    if constexpr (WINDOW || PAIRWISE) {                     // any tile may be partly masked
        for (; tile >= tiles.first; tile = next)
            if (tiles.full(tile) && pair_mask.sees_all(q_start / BLOCK_Q, tile))
                iterate(Bool<false>{});
            else
                iterate(Bool<true>{});
    } else {
        for (; tile >= tiles.num_full; --tile) iterate(Bool<true>{});
        for (; tile >= 0; --tile) iterate(Bool<false>{});
    }

    finish(call_args, shared, acc, acc_dot, softmax, states);
}
