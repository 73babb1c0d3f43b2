// Forward attention of few queries over many keys (decoding), for 16-bit types by mma.sync.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): the keys of a head are split among blocks
// (parts.cuh), whose states finish/merge_parts.cu merges. The query heads of a group are packed:
// their queries are rows of one tile, so K and V are read once per key head. Bound by memory: the
// tensor cores have 16 rows to multiply with each key.
//
// A warp takes 16 keys of each key tile and has a pipeline of its own, which loads them by
// cp.async; it keeps m, l and acc of all rows over its keys. Warps meet only at the end of a part,
// where their states are merged. Inside the loop only __syncwarp is used.
//
// Grid: parts.cuh. Block: NUM_WARPS warps.
//
// Constants: Element, CAUSAL, BLOCK_Q, the rows of a tile; BLOCK_K = 16 NUM_WARPS; NUM_STAGES;
// BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to multiples
// of 32; NEGATE_SCORES, whether scale < 0 and scores are LINEAR (score_mod.cuh); BALANCED
// (parts.cuh); those of a KV cache (constants.cuh); Arguments and the options
// (docs/guide/options.md).
// Shared memory: SharedPlan (rows.cuh), tiles as in smem.cuh.
//
// Bad at: many rows, which read the keys again for every 16 or 32 of them.
#include "decode/epilogue.cuh"
#include "decode/float8_rows.cuh"
#include "decode/key_pipeline.cuh"
#include "decode/rows.cuh"

// Starts the loads of the tile's rows. Rows past the last become 0.
__device__ __forceinline__ void load_queries(
    u32 q_smem, const ForwardArguments& arrays, const RowTile& rows) {
    const u16* q = static_cast<const u16*>(arrays.q);
    for_each_chunk<BLOCK_Q, HEAD_DIM, THREADS>(threadIdx.x, [&](int row, int column) {
        const int columns = rows.exists(row) ? arrays.shape.head_dim - column : 0;
        const int bytes = min(max(columns, 0), CHUNK_ELEMENTS) * 2;
        cp_async_16_partly(q_smem + tile_offset<BLOCK_Q>(row, column),
                           q + (bytes > 0 ? rows.offset(arrays.q_stride, row) + column : 0), bytes);
    });
}

__device__ __forceinline__ void compute_scores(Scores& s, u32 q_smem, u32 k_smem) {
    if constexpr (IS_FLOAT8) score_gemm_float8(s, q_smem, k_smem);
    else score_gemm(s, q_smem, k_smem);
}

// acc += P V. A NaN or an infinity of a key that is masked does not spread.
__device__ __forceinline__ void add_values(
    Output& acc, const Scores& p, const Visible& visible, bool is_masked, u32 v_smem) {
    if constexpr (IS_FLOAT8) {
        if (is_masked && holds_nan(v_smem)) accumulate_visible_float8(acc, p, visible, v_smem);
        else accumulate_float8(acc, p, v_smem);
    } else {
        if (is_masked && holds_nonfinite(v_smem)) accumulate_visible(acc, p, visible, v_smem);
        else accumulate(acc, p, v_smem);
    }
}

// A row tile's state over a part of its keys, of this warp's keys: m, l and acc.
__device__ __forceinline__ void compute_part(
    const Arguments& args, SharedPlan& shared, const Part& part, const RowTile& rows,
    const LaneRows& lane_rows, SoftmaxState& softmax, Output& acc) {
    const Mask<CAUSAL, WINDOW> mask = mask_of(args, part.sequence);
    const auto user_mask = rows.user_mask(args);
    const TileRange in_bounds = rows.key_tiles(mask, part);
    const float k_scale = k_scale_of_head(args, rows.kv_head);
    KeyPipeline pipeline(args, shared, part, in_bounds);    // reads the first page meanwhile
    const VisitedTiles tiles = rows.visited(user_mask, in_bounds);
    pipeline.restrict_to(tiles);
    load_queries(shared_address(&shared.tiles.q), args.arrays, rows);
    cp_async_commit();
    for (int i = 0; i < NUM_STAGES - 1; ++i) pipeline.load_next();
    cp_async_wait<NUM_STAGES - 1>();
    __syncthreads();                                        // Q has come, for all warps
    if constexpr (IS_FLOAT8) {
        arrange_queries(shared_address(&shared.tiles.q));
        __syncthreads();
    }

    for (int tile = tiles.first; tile < tiles.end; ++tile) {
        if constexpr (NUM_STAGES == 1) pipeline.load_next();
        pipeline.wait();
        const int first_key = tile * BLOCK_K + threadIdx.x / 32 * WARP_KEYS;
        if constexpr (NUM_STAGES > 1) pipeline.load_next();
        Scores s;
        compute_scores(s, shared_address(&shared.tiles.q), pipeline.k_smem());
        pipeline.apply_k_scales(s, shared.tiles, k_scale);
        if constexpr (!LINEAR) lane_rows.apply_score_mod(s, mask, first_key);
        u32 masked = 0;
        if (rows.is_masked(mask, tiles, tile, first_key, WARP_KEYS))
            masked = rows.masked_eights<S_TILES>(mask, user_mask, first_key);
        Visible visible;
        if (masked != 0)
            lane_rows.apply_mask(
                s, mask, first_key, masked, [&](int i, int j, int x, bool is_visible) {
                    visible[i][j][x] = is_visible;
                });
        softmax_step<true>(s, softmax, acc, lane_rows.scale_log2);
        if constexpr (DROPOUT) lane_rows.apply_dropout(s, first_key);
        pipeline.apply_v_scales(s, shared.tiles);
        add_values(acc, s, visible, masked != 0, pipeline.v_smem());
        pipeline.release();
    }
    cp_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_decode(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    Parts parts(args);
    Part part;
    while (parts.next(part)) {
        const RowTile rows(args, part);
        const LaneRows lane_rows(args, rows);
        SoftmaxState softmax;
        Output acc;
        set_zero(acc);
        reset(softmax);
        compute_part(args, shared, part, rows, lane_rows, softmax, acc);
        griddepcontrol_launch_dependents();                 // of finish/merge_parts.cu
        __syncthreads();                                    // all tiles are free
        share_state(shared.states, rows, acc, softmax);
        __syncthreads();
        store_part(args, part, rows, shared.states, lane_rows.scale_log2);
        __syncthreads();                                    // all states have been read
    }
}
