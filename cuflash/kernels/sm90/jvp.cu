// Forward attention and its derivative along directions, for 16-bit types on Hopper (sm_90a).
//
//     O = P V,  b = rowsum(P * W) = lse',  O' = (P * W) V + P V' - b O,
//     W = scale (Q' K^T + Q K'^T)
//
// As forward.cu: warpgroup 0, the producer, loads tiles by TMA; the consumers compute 64 queries of
// the tile each and visit the key tiles from the last to the first, with online softmax. A tile
// takes up to six matmuls, three that end in S and W and three that start from P and P * W:
//
//     tensor cores  | S  W of one consumer | O O' of the other | S  W ...
//     warps           softmax of the other   softmax of the one
//
// P * W is rounded to Element. Relative to a row's reference r it is small where W is alike for all
// keys, as with a component of K' that they share (docs/guide/derivatives.md):
//
//     b = r + sum P (W - r) / l,  O' = (sum P (W - r) V + P V') / l - (b - r) O
//
// which hold for any r; r is the mean of W, by weight, over the first tile with a key of the row.
//
// With two DIRECTIONS a block computes S, P and O once. The second one's W and O' come after the
// first one's, in the same registers of W:
//
//     S  W | O  O' | W of the second | O' of the second
//
// If it READS_OUT, which the first direction's launch has stored, it takes five matmuls without O.
//
// Grid: tiles of BLOCK_Q queries of all (group of directions, batch, head), longest first
// (scheduler.cuh). A direction counts as a batch: its tangents are slices of arrays (directions *
// batch, ...). The block of the first direction stores O and lse.
// Block: 1 + CONSUMER_WARPGROUPS warpgroups.
//
// A NaN or an infinity at a masked key makes rows non-finite, as 0 * NaN; so do P * W beyond
// float16, and exponents so large that a float holds no fraction of them. Their warps set a flag,
// and simt/jvp.cu, launched next, computes the flagged rows.
//
// With SCORE_MOD the user's f follows S, and W becomes f_x W + sum f_a a' (score/tangents.cuh).
//
// Constants: Element, CAUSAL, NEGATE_SCORES (scale < 0), HEAD_DIM and HEAD_DIM_V (multiples of 16
// that ptx.cuh has MMAs for), BLOCK_Q, BLOCK_K, KV_STAGES, SHARED_BYTES; Q_DOT, K_DOT, V_DOT,
// MOD_DOT: what moves; DIRECTIONS, 1 with SCORE_MOD; FIRST_DIRECTION, LAST_DIRECTION, READS_OUT;
// Arguments; no options but SCORE_MOD.
// Shared memory: SharedPlan, tiles as in smem.cuh.
// mbarriers: *_full: from TMA to the consumers, an arrival for each tile, and its bytes. *_empty:
// back, an arrival of each consumer warp.
//
// Bad at: short sequences: a block has one query tile, so nothing overlaps its beginning and end.
#include "common/row_flags.cuh"
#include "common/scheduler.cuh"
#include "score/directions.cuh"
#include "score/tangents.cuh"
#include "sm90/consumer_constants.cuh"
#include "sm90/forward_softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/score_mask.cuh"
#include "sm90/jvp_weights.cuh"

constexpr int SIGN = NEGATE_SCORES ? -1 : 1;

// 512 for the four threads of the same rank in the warpgroups, and 504 where there are three.
constexpr int CONSUMER_REGISTERS = CONSUMER_WARPGROUPS == 3 ? 160 : 240;
static_assert(CONSUMER_WARPGROUPS == 2 || CONSUMER_WARPGROUPS == 3, "each has these registers");
static_assert(DIRECTIONS == 1 || !SCORE_MOD, "slopes of f are not kept for a second direction");

using Output = float[O_COUNT];

struct KeyStage {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot[DIRECTIONS];
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot[DIRECTIONS];
};
struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot[DIRECTIONS];
    KeyStage keys[KV_STAGES];
    u64 q_full, k_full[KV_STAGES], k_empty[KV_STAGES], v_full[KV_STAGES], v_empty[KV_STAGES];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Before the block's first barrier, by one thread.
__device__ __forceinline__ void init_barriers(SharedPlan& shared) {
    mbarrier_init(shared_address(&shared.q_full), 1 + Q_DOT * DIRECTIONS);
    for (int i = 0; i < KV_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.k_full[i]), 1 + K_DOT * DIRECTIONS);
        mbarrier_init(shared_address(&shared.v_full[i]), 1 + V_DOT * DIRECTIONS);
        mbarrier_init(shared_address(&shared.k_empty[i]), CONSUMER_WARPS);
        mbarrier_init(shared_address(&shared.v_empty[i]), CONSUMER_WARPS);
    }
    fence_mbarrier_init();
}

// The block's tile. `slice` counts batches of all directions: where the tangents of its first
// direction stand.
struct QueryTile {
    int q_start, head, batch, slice, num_batches;
    bool stores_out;                                        // of the first direction

    __device__ __forceinline__ explicit QueryTile(const Arguments& args) {
        const Shape& shape = args.arrays.shape;
        const int num_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
        const TileCoord coord = tile_of_block(
            blockIdx.x, num_tiles, shape.num_heads_q,
            shape.batch * num_direction_groups(args.tangents), args.arrays.schedule);
        q_start = (CAUSAL ? num_tiles - 1 - coord.tile : coord.tile) * BLOCK_Q;
        head = coord.head;
        num_batches = shape.batch;
        batch = coord.batch % num_batches;
        slice = coord.batch;
        if constexpr (DIRECTIONS > 1 || LAST_DIRECTION || READS_OUT) {
            const int group = coord.batch / num_batches;
            slice = first_direction_of(group, args.tangents) * num_batches + batch;
        }
        stores_out = slice < num_batches;
    }
    __device__ __forceinline__ int slice_of(int direction) const {
        return slice + direction * num_batches;
    }
};

// ---- The producer, one thread ----

__device__ __forceinline__ void produce(
    const Arguments& args, SharedPlan& shared, const QueryTile& tile, int num_key_tiles) {
    const Shape& shape = args.arrays.shape;
    const int kv_head = tile.head / (shape.num_heads_q / shape.num_heads_kv);
    const u32 q_full = shared_address(&shared.q_full);
    tma_load_tile<BLOCK_Q, HEAD_DIM>(
        shared_address(&shared.q), args.q_map, q_full, tile.q_start, tile.head, tile.batch);
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v)
        if constexpr (Q_DOT) tma_load_tile<BLOCK_Q, HEAD_DIM>(
            shared_address(&shared.q_dot[v]), args.q_dot_map, q_full, tile.q_start, tile.head,
            tile.slice_of(v));
    PipelineState<KV_STAGES> stage;
    for (int key_tile = num_key_tiles - 1; key_tile >= 0; --key_tile, stage.next()) {
        KeyStage& keys = shared.keys[stage.index];
        const int token = key_tile * BLOCK_K;
        const u32 k_full = shared_address(&shared.k_full[stage.index]);
        mbarrier_wait(shared_address(&shared.k_empty[stage.index]), stage.phase ^ 1);
        tma_load_tile<BLOCK_K, HEAD_DIM>(
            shared_address(&keys.k), args.k_map, k_full, token, kv_head, tile.batch);
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v)
            if constexpr (K_DOT) tma_load_tile<BLOCK_K, HEAD_DIM>(
                shared_address(&keys.k_dot[v]), args.k_dot_map, k_full, token, kv_head,
                tile.slice_of(v));
        const u32 v_full = shared_address(&shared.v_full[stage.index]);
        mbarrier_wait(shared_address(&shared.v_empty[stage.index]), stage.phase ^ 1);
        tma_load_tile<BLOCK_K, HEAD_DIM_V>(
            shared_address(&keys.v), args.v_map, v_full, token, kv_head, tile.batch);
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v)
            if constexpr (V_DOT) tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                shared_address(&keys.v_dot[v]), args.v_dot_map, v_full, token, kv_head,
                tile.slice_of(v));
    }
}

// ---- A consumer warpgroup ----

struct Consumer {
    const Arguments& args;
    SharedPlan& shared;
    const QueryTile& tile;
    Output &acc, (&acc_dot)[DIRECTIONS];
    RowState& rows;
    TangentState (&tangents)[DIRECTIONS];

    // The shuffle tells the compiler that the value is uniform across a warp.
    const int warpgroup =
        __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int lane = threadIdx.x % 32;
    const int lane_row = (threadIdx.x / 32 - 4) * 16 + lane / 4;    // the lane's first
    // What S and W are multiplied by; f has done that.
    const float scale = SCORE_MOD ? 1.0f : fabsf(static_cast<float>(args.arrays.scale));
    const float scale_log2 = exponent_scale<!SCORE_MOD>(args.arrays.scale);
    ScoreMod<float> score_mod{args};
    const HeadTangent<float> tangent{
        args, tile.slice / tile.num_batches, tile.batch, tile.head};

    // W = Q' K^T + Q K'^T of a direction and, if it is the first, S = Q K^T, asynchronously.
    template <int DIRECTION>
    __device__ __forceinline__ void issue_scores(Scores& s, Scores& w, int stage) {
        const int rows_before = warpgroup * CONSUMER_ROWS * PANEL_ROW_BYTES;
        const u64 q = descriptor(shared_address(&shared.q) + rows_before, 0);
        const u64 q_dot = descriptor(shared_address(&shared.q_dot[DIRECTION]) + rows_before, 0);
        const u64 k = descriptor(shared_address(&shared.keys[stage].k), 0);
        const u64 k_dot = descriptor(shared_address(&shared.keys[stage].k_dot[DIRECTION]), 0);
        if constexpr (DIRECTION == 0) warpgroup_fence_operand(s);
        warpgroup_fence_operand(w);
        wgmma_fence();
        if constexpr (DIRECTION == 0)
            gemm_abt_ss<Element, SIGN, BLOCK_Q, BLOCK_K, HEAD_DIM>(s, q, k);
        if constexpr (Q_DOT) gemm_abt_ss<Element, SIGN, BLOCK_Q, BLOCK_K, HEAD_DIM>(w, q_dot, k);
        if constexpr (K_DOT)
            gemm_abt_ss<Element, SIGN, BLOCK_Q, BLOCK_K, HEAD_DIM>(w, q, k_dot, Q_DOT);
        wgmma_commit();
    }

    // acc_dot += P (W - r) V + P V' of a direction and, if it is the first, acc += P V unless
    // READS_OUT, asynchronously.
    template <int DIRECTION>
    __device__ __forceinline__ void issue_output(
        const u32 (&p)[P_COUNT], const u32 (&pw)[P_COUNT], int stage) {
        constexpr int PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;
        const u64 v = descriptor(shared_address(&shared.keys[stage].v), PANEL_BYTES);
        const u64 v_dot =
            descriptor(shared_address(&shared.keys[stage].v_dot[DIRECTION]), PANEL_BYTES);
        Output& moved = acc_dot[DIRECTION];
        constexpr bool WITH_OUT = DIRECTION == 0 && !READS_OUT;
        if constexpr (WITH_OUT) warpgroup_fence_operand(acc);
        warpgroup_fence_operand(moved);
        wgmma_fence();
        if constexpr (WITH_OUT) gemm_ab_rs<Element, BLOCK_K>(acc, p, v, true);
        if constexpr (SCORES_MOVE) gemm_ab_rs<Element, BLOCK_K>(moved, pw, v, true);
        if constexpr (V_DOT) gemm_ab_rs<Element, BLOCK_K>(moved, p, v_dot, true);
        wgmma_commit();
    }

    // One key tile. is_masked: some of its pairs are.
    __device__ __forceinline__ void iterate(
        PipelineState<KV_STAGES> stage, const Mask<CAUSAL>& mask, int key_tile, bool is_masked) {
        Scores s, w;
        float rescale[2];
        mbarrier_wait(shared_address(&shared.k_full[stage.index]), stage.phase);
        issue_scores<0>(s, w, stage.index);
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        warpgroup_fence_operand(w);
        if constexpr (DIRECTIONS == 1) release(shared.k_empty, stage.index);

        if constexpr (SCORE_MOD) apply_score_mod(s, w, key_tile * BLOCK_K);
        const bool had_no_key[2] = {rows.max[0] == -infinity(), rows.max[1] == -infinity()};
        if (is_masked) apply_mask(s, mask, tile.q_start + lane_row, key_tile * BLOCK_K);
        online_softmax<true>(s, rows, scale_log2, rescale);
        weigh<0>(s, w, had_no_key, rescale);
        #pragma unroll
        for (int i = 0; i < O_COUNT; ++i) {
            if constexpr (!READS_OUT) acc[i] *= rescale[i / 2 % 2];
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) acc_dot[v][i] *= rescale[i / 2 % 2];
        }
        u32 p[P_COUNT], pw[P_COUNT];
        pack_pairs<Element>(p, s);
        if constexpr (SCORES_MOVE) pack_pairs<Element>(pw, w);

        mbarrier_wait(shared_address(&shared.v_full[stage.index]), stage.phase);
        issue_output<0>(p, pw, stage.index);
        wgmma_wait<0>();
        if constexpr (!READS_OUT) warpgroup_fence_operand(acc);
        warpgroup_fence_operand(acc_dot[0]);
        if constexpr (DIRECTIONS == 2) iterate_second(stage.index, s, w, had_no_key, rescale);
        release(shared.v_empty, stage.index);
    }

    // S and W become f of the scores, and its tangent.
    __device__ __forceinline__ void apply_score_mod(Scores& s, Scores& w, int k_start) const {
        const auto apply = [&](auto small) {
            #pragma unroll
            for (int i = 0; i < S_COUNT; ++i) {
                const int query = tile.q_start + lane_row + i / 2 % 2 * 8;
                const int key = k_start + i / 4 * 8 + lane % 4 * 2 + i % 2;
                const float x_dot = Q_DOT || K_DOT ? w[i] * score_mod.scale : 0.0f;
                Derivatives<float> derivatives;
                s[i] = score_mod.template score<decltype(small)::value>(
                    s[i], 0.0f, query, key, derivatives);
                w[i] = tangent.of(score_mod, derivatives, x_dot, query, key);
            }
        };
        with_size_tested(score_mod, s, apply);
    }

    // The same key tile in the second direction, from P.
    __device__ __forceinline__ void iterate_second(
        int stage, Scores& s, Scores& w, const bool (&had_no_key)[2], const float (&rescale)[2]) {
        if constexpr (SCORES_MOVE) {
            issue_scores<1>(s, w, stage);
            wgmma_wait<0>();
            warpgroup_fence_operand(w);
        }
        release(shared.k_empty, stage);
        weigh<1>(s, w, had_no_key, rescale);
        u32 p[P_COUNT], pw[P_COUNT];
        if constexpr (V_DOT) pack_pairs<Element>(p, s);
        if constexpr (SCORES_MOVE) pack_pairs<Element>(pw, w);
        issue_output<1>(p, pw, stage);
        wgmma_wait<0>();
        warpgroup_fence_operand(acc_dot[1]);
    }

    // W of a direction becomes P (W - r); had_no_key: rows before this tile.
    template <int DIRECTION>
    __device__ __forceinline__ void weigh(
        const Scores& p, Scores& w, const bool (&had_no_key)[2], const float (&rescale)[2]) {
        if constexpr (SCORES_MOVE) {
            if (__ballot_sync(WHOLE_WARP, had_no_key[0] || had_no_key[1]) != 0)
                choose_references(tangents[DIRECTION], had_no_key, p, w, scale);
            weigh_tangents(tangents[DIRECTION], p, w, scale, rescale);
        }
    }

    // A key tile that only the other warpgroup sees. Lane 0 releases a stage for its warp, whose
    // other lanes would miss the phase if they waited for it later.
    __device__ __forceinline__ void skip(PipelineState<KV_STAGES> stage) {
        mbarrier_wait(shared_address(&shared.k_full[stage.index]), stage.phase);
        __syncwarp();
        release(shared.k_empty, stage.index);
        mbarrier_wait(shared_address(&shared.v_full[stage.index]), stage.phase);
        __syncwarp();
        release(shared.v_empty, stage.index);
    }
    __device__ __forceinline__ void release(u64 (&empty)[KV_STAGES], int stage) {
        mbarrier_arrive_if(lane == 0, shared_address(&empty) + 8 * stage);
    }

    // acc = O of the lane's rows, from global memory.
    __device__ __forceinline__ void load_out(int query) {
        const Strides& stride = args.arrays.out_stride;
        const Element* out = static_cast<const Element*>(args.arrays.out)
                           + tile.batch * stride.batch + tile.head * stride.head;
        #pragma unroll
        for (int i = 0; i < O_COUNT; i += 2) {
            const int row = query + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
            u32 pair = 0;
            if (row < args.arrays.shape.seqlen_q && column < args.arrays.shape.head_dim_v)
                pair = *reinterpret_cast<const u32*>(out + row * stride.token + column);
            acc[i] = to_float(low_half<Element>(pair));
            acc[i + 1] = to_float(high_half<Element>(pair));
        }
    }

    // O, lse and their tangents to global memory; the flags of the warp's rows.
    __device__ __forceinline__ void store() {
        const ForwardArguments& arrays = args.arrays;
        const Shape& shape = arrays.shape;
        const int query = tile.q_start + lane_row;
        if constexpr (READS_OUT) load_out(query);
        const i64 rows_before = (i64{tile.batch} * shape.num_heads_q + tile.head) * shape.seqlen_q;
        i64 moved_before[DIRECTIONS];
        bool exact[DIRECTIONS];
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            const i64 head = i64{tile.slice_of(v)} * shape.num_heads_q + tile.head;
            moved_before[v] = head * shape.seqlen_q;
            exact[v] = true;
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float m = rows.max[half], l = quad_sum(rows.sum[half]);
            const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
            float b[DIRECTIONS];
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) b[v] = quad_sum(tangents[v].sum[half]) * inverse;
            #pragma unroll
            for (int j = 0; j < O_COUNT / 4; ++j)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int i = j * 4 + half * 2 + x;
                    if constexpr (!READS_OUT) acc[i] *= inverse;
                    #pragma unroll
                    for (int v = 0; v < DIRECTIONS; ++v) {
                        float& o_dot = acc_dot[v][i];
                        o_dot = fmaf(o_dot, inverse, -b[v] * acc[i]);
                        exact[v] &= fabsf(acc[i]) < infinity() && fabsf(o_dot) < infinity();
                    }
                }
            // As in forward_epilogue.cuh: an exponent of 2^24 has no fraction.
            const float max_scaled = finite_max_scaled(m, scale_log2);
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                exact[v] &= l < infinity() && fabsf(max_scaled) < 0x1p24f
                         && fabsf(b[v]) < infinity();
            if (lane % 4 != 0 || query + half * 8 >= shape.seqlen_q) continue;
            if (arrays.lse != nullptr && tile.stores_out)
                static_cast<float*>(arrays.lse)[rows_before + query + half * 8] =
                    lse_of_sum(m, l, scale, scale_log2, max_scaled);
            if (args.lse_dot != nullptr)
                #pragma unroll
                for (int v = 0; v < DIRECTIONS; ++v)
                    static_cast<float*>(args.lse_dot)[moved_before[v] + query + half * 8] =
                        l == 0.0f ? 0.0f : tangents[v].reference[half] + b[v];
        }
        const i64 stride = arrays.out_stride.token;
        if (arrays.out != nullptr && tile.stores_out)
            store_to_array(
                static_cast<Element*>(arrays.out) + tile.batch * arrays.out_stride.batch
                    + tile.head * arrays.out_stride.head + query * stride,
                stride, acc, query, shape.seqlen_q, shape.head_dim_v);
        const DirectionStrides& moved = args.tangents.out_dot;  // contiguous: a slice is a batch
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            const int slice = tile.slice_of(v);
            if (args.out_dot != nullptr)
                store_to_array(
                    static_cast<Element*>(args.out_dot) + slice * moved.batch
                        + tile.head * moved.head + query * moved.token,
                    moved.token, acc_dot[v], query, shape.seqlen_q, shape.head_dim_v);
            const bool all_exact = __ballot_sync(WHOLE_WARP, exact[v]) == WHOLE_WARP;
            const int first_row = query - lane / 4;
            if (lane == 0 && first_row < shape.seqlen_q)
                *recompute_flag_of_rows(args, slice, tile.head, first_row) = !all_exact;
        }
    }
};

__device__ __forceinline__ void consume(
    const Arguments& args, SharedPlan& shared, const QueryTile& tile, const Mask<CAUSAL>& mask,
    int num_key_tiles) {
    Output acc, acc_dot[DIRECTIONS];
    #pragma unroll
    for (int i = 0; i < O_COUNT; ++i) {
        acc[i] = 0.0f;
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) acc_dot[v][i] = 0.0f;
    }
    RowState rows = empty_rows();
    TangentState tangents[DIRECTIONS];
    Consumer consumer{args, shared, tile, acc, acc_dot, rows, tangents};
    if constexpr (SCORE_MOD) consumer.score_mod.set_head(args, tile.batch, tile.head);
    const int first_row = tile.q_start + consumer.warpgroup * CONSUMER_ROWS;
    const KeyTiles visited = mask.key_tiles(first_row, CONSUMER_ROWS, BLOCK_K);
    const int end = first_row < mask.seqlen_q ? visited.num_visited : 0;
    PipelineState<KV_STAGES> stage;
    mbarrier_wait(shared_address(&shared.q_full), 0);
    int key_tile = num_key_tiles - 1;
    for (; key_tile >= end; --key_tile, stage.next()) consumer.skip(stage);
    for (; key_tile >= 0; --key_tile, stage.next())
        consumer.iterate(stage, mask, key_tile, key_tile >= visited.num_full);
    consumer.store();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
jvp_sm90(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const QueryTile tile(args);
    const Mask<CAUSAL> mask{args.arrays.shape.seqlen_q, args.arrays.shape.seqlen_k, {}};
    const int num_key_tiles = mask.key_tiles(tile.q_start, BLOCK_Q, BLOCK_K).num_visited;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == 0) produce(args, shared, tile, num_key_tiles);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(args, shared, tile, mask, num_key_tiles);
    }
}
