// Forward attention of few queries over many keys (decoding), for 16-bit types by mma.sync.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): the keys of a head are split among blocks, each
// of which leaves O and lse of its part, and finish/merge_splits.cu merges the parts. The query
// heads of a group are packed: their queries are rows of one tile, so K and V are read once per
// key head. Bound by memory: the tensor cores have 16 rows to multiply with each key.
//
// A warp takes 16 keys of each key tile and has a pipeline of its own, which loads them by
// cp.async; it keeps m, l and acc of all rows over its keys. Warps meet only at the end, where
// their states are merged. Nothing is synchronised meanwhile but lanes.
//
// Grid: blockIdx.x = ((batch * num_heads_kv + head) * row_tiles + row_tile) * num_splits + split.
// Block: NUM_WARPS warps. Row r of a row tile counts (query, query head of the group) pairs.
//
// Constants: Element, CAUSAL, BLOCK_Q, the rows of a tile; BLOCK_K = 16 NUM_WARPS; NUM_STAGES;
// BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions rounded up to multiples
// of 32; NEGATE_SCORES, whether scale < 0 and scores are LINEAR (score_mod.cuh); SPLIT, whether
// parts are merged later; Arguments and the options (docs/guide/options.md).
// Shared memory: SharedPlan (rows.cuh), tiles as in smem.cuh.
//
// Bad at: many rows, which read the keys again for every 16 or 32 of them.
#include "decode/rows.cuh"
#include "decode/epilogue.cuh"

// Loads the warp's keys of one tile after another, each as one cp.async group.
struct KeyPipeline {
    SharedPlan& shared;
    const u16 *k, *v;                                       // the head's first key
    i64 k_stride, v_stride;
    int seqlen_k, head_dim, head_dim_v, warp, end_tile;
    int next_tile, next_stage = 0, stage = 0;

    __device__ __forceinline__ void load_next() {
        if (next_tile < end_tile) {
            const int first_key = next_tile * BLOCK_K + warp * WARP_KEYS;
            load_keys<HEAD_DIM>(shared_address(&shared.k[warp][next_stage]), k, k_stride,
                                first_key, seqlen_k, head_dim);
            load_keys<HEAD_DIM_V>(shared_address(&shared.v[warp][next_stage]), v, v_stride,
                                  first_key, seqlen_k, head_dim_v);
        }
        cp_async_commit();                                  // an empty group past the last tile
        ++next_tile;
        next_stage = next_stage + 1 == NUM_STAGES ? 0 : next_stage + 1;
    }
    // Waits for the oldest tile.
    __device__ __forceinline__ void wait() const {
        cp_async_wait<NUM_STAGES - 2>();
        __syncwarp();
    }
    // The oldest tile's stage may be loaded again.
    __device__ __forceinline__ void release() {
        __syncwarp();
        stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
    }

private:
    // Keys past the last and columns past the head dimension become 0.
    template <int COLUMNS>
    static __device__ __forceinline__ void load_keys(
        u32 tile, const u16* from, i64 stride, int first_key, int seqlen_k, int num_columns) {
        for_each_chunk<WARP_KEYS, COLUMNS, 32>(threadIdx.x % 32, [&](int row, int column) {
            const int key = first_key + row;
            const int bytes = key < seqlen_k ? min(max(num_columns - column, 0), 8) * 2 : 0;
            const u16* source = from + (bytes > 0 ? key * stride + column : 0);
            const u32 target = tile + tile_offset<WARP_KEYS>(row, column);
            cp_async_16_partly(target, source, bytes);
        });
    }
};

// Starts the loads of the tile's rows. Rows past the last become 0.
__device__ __forceinline__ void load_queries(
    u32 q_smem, const ForwardArguments& arrays, const RowTile& rows) {
    const Strides stride = arrays.q_stride;
    const u16* q = static_cast<const u16*>(arrays.q) + rows.batch * stride.batch;
    for_each_chunk<BLOCK_Q, HEAD_DIM, THREADS>(threadIdx.x, [&](int row, int column) {
        const bool exists = rows.query_of(row) < arrays.shape.seqlen_q;
        const int bytes = exists ? min(max(arrays.shape.head_dim - column, 0), 8) * 2 : 0;
        const i64 offset = rows.query_of(row) * stride.token + rows.head_of(row) * stride.head;
        cp_async_16_partly(q_smem + tile_offset<BLOCK_Q>(row, column),
                           q + (bytes > 0 ? offset + column : 0), bytes);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_decode(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const ForwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const Strides ks = arrays.k_stride, vs = arrays.v_stride;
    const int warp = threadIdx.x / 32;

    // Prologue: which rows, which key tiles.
    const RowTile rows(args);
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const TileRange tiles = rows.key_tiles(mask, args.num_splits);
    LaneRows lane_rows(args, rows);
    KeyPipeline pipeline{
        shared,
        static_cast<const u16*>(arrays.k) + rows.batch * ks.batch + rows.kv_head * ks.head,
        static_cast<const u16*>(arrays.v) + rows.batch * vs.batch + rows.kv_head * vs.head,
        ks.token, vs.token, shape.seqlen_k, shape.head_dim, shape.head_dim_v, warp, tiles.end,
        tiles.first};
    load_queries(shared_address(&shared.q), arrays, rows);
    cp_async_commit();
    for (int i = 0; i < NUM_STAGES - 1; ++i) pipeline.load_next();
    cp_async_wait<NUM_STAGES - 1>();
    __syncthreads();                                        // Q has come, for all warps

    SoftmaxState softmax;
    Output acc;
    set_zero(acc);
    reset(softmax);
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
        pipeline.wait();
        const u32 k_smem = shared_address(&shared.k[warp][pipeline.stage]);
        const u32 v_smem = shared_address(&shared.v[warp][pipeline.stage]);
        const int first_key = tile * BLOCK_K + warp * WARP_KEYS;
        pipeline.load_next();
        Scores s;
        score_gemm(s, shared_address(&shared.q), k_smem);
        if constexpr (!LINEAR) lane_rows.apply_score_mod(s, mask, first_key);
        const bool is_masked = rows.masks(mask, first_key);
        Visible visible;
        if (is_masked) lane_rows.apply_mask(s, visible, mask, first_key);
        softmax_step(s, softmax, acc, lane_rows.scale_log2);
        if constexpr (DROPOUT) lane_rows.apply_dropout(s, first_key);
        if (is_masked && holds_nonfinite(v_smem)) accumulate_visible(acc, s, visible, v_smem);
        else accumulate(acc, s, v_smem);
        pipeline.release();
    }

    // Epilogue: the warps' states, merged, leave.
    cp_async_wait<0>();
    __syncthreads();                                        // all stages are free
    share_state(shared.states(), warp, acc, softmax);
    __syncthreads();
    store_rows(args, rows, shared.states(), lane_rows.scale_log2);
}
