// Forward attention of few queries over many keys (decoding), on CUDA cores: any type, head
// dimension and GPU, rows of any alignment.
//
//     S = Q K^T,  x = scale S,  lse = log(rowsum(exp(x))),  O = exp(x - lse) V
//
// Flash-Decoding as in decode/forward.cu: the keys of a head are split among blocks (parts.cuh),
// the query heads of a group are rows of one tile, and
// finish/merge_parts.cu merges the states of parts.
// Computes in Real, as simt/forward.cu: exp and log are the library's. 16-bit elements are rounded
// once, when they are stored.
//
// A warp takes WARP_KEYS keys of each key tile, loads K and V into registers and keeps m, l and acc
// of all rows over its keys. Its lanes share the columns. Warps meet only at the end of a part.
// Bound by memory: the next tile's K is loaded as soon as the scores have been computed, its V as
// soon as V has been added. So K and V are under way while a warp waits for K. Were V loaded with
// K, in the iteration that uses both, ptxas would move its loads behind the wait for K.
//
// Grid: parts.cuh. Block: NUM_WARPS warps.
//
// Constants: Element, CAUSAL, BLOCK_Q, the rows of a tile, a power of two up to 32; BLOCK_K =
// WARP_KEYS NUM_WARPS; BLOCKS_PER_SM, SHARED_BYTES; HEAD_DIM and HEAD_DIM_V, the head dimensions
// rounded up to multiples of 32 K_VECTOR and 32 V_VECTOR (simt_keys.cuh); BALANCED (parts.cuh);
// those of a KV cache (constants.cuh); Arguments and the options
// (docs/guide/options.md).
// Shared memory: SharedPlan.
//
// Slow for many rows: all warps reread the keys, and each row costs registers.
#include "decode/results.cuh"
#include "decode/simt_rows.cuh"

// Each warp's state of each row, after its last key.
struct SharedPlan {
    Real acc[NUM_WARPS][BLOCK_Q][HEAD_DIM_V];
    Real m[NUM_WARPS][BLOCK_Q], l[NUM_WARPS][BLOCK_Q];
};
static_assert(sizeof(SharedPlan) <= SHARED_BYTES, "the plan and the kernel disagree");

// A row tile's state over a part of its keys, of this warp's keys.
__device__ __forceinline__ void compute_part(
    const Arguments& args, const Part& part, const RowTile& rows, WarpRows& warp_rows) {
    const LaneRow lane_row(args, rows);
    const auto user_mask = rows.user_mask(args);
    const VisitedTiles tiles =
        rows.visited(user_mask, rows.key_tiles(lane_row.mask, part));
    KeyLoads loads(args, part, tiles);
    WarpKeys keys;
    loads.load_k(keys, tiles.first);
    loads.load_v(keys, tiles.first);
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
        const int first_key = KeyLoads::first_key(tile);
        OwnPairs own;
        score_gemm(own, warp_rows, keys);
        loads.load_k(keys, tile + 1);
        lane_row.apply_scales_and_score_mod(own, keys, first_key);
        bool is_masked = rows.is_masked(lane_row.mask, tiles, tile, first_key, WARP_KEYS);
        if constexpr (MASKS_BY_INTERVALS)
            is_masked = is_masked && rows.masked_eights<(WARP_KEYS + 7) / 8>(
                lane_row.mask, user_mask, first_key);
        lane_row.apply_mask(own, is_masked, first_key);
        softmax_step(own, warp_rows);
        lane_row.apply_to_weights(own, keys, first_key);
        accumulate(warp_rows, own, keys);
        loads.load_v(keys, tile + 1);
    }
}

__device__ __forceinline__ void share_state(SharedPlan& shared, const WarpRows& rows) {
    const int warp = threadIdx.x / 32, row = LaneRow::row();
    Real l = rows.l;
    #pragma unroll
    for (int distance = LANES_OF_PAIR; distance < LANES_OF_ROW; distance *= 2)
        l += __shfl_xor_sync(WHOLE_WARP, l, distance);
    if (threadIdx.x % LANES_OF_ROW == 0) {
        shared.m[warp][row] = rows.m;
        shared.l[warp][row] = l;
    }
    #pragma unroll
    for (int r = 0; r < BLOCK_Q; ++r)
        #pragma unroll
        for (int i = 0; i < VColumns::COUNT; ++i)
            shared.acc[warp][r][VColumns::column(i)] = rows.acc[r][i];
}

// The merged m and l of a row, and the factor that turns a warp's l and acc into the merged ones.
// The factor of a warp without a visible key is 0, and so is its acc, or NaN if a NaN is visible.
struct MergedWarps {
    Real m = -Real(infinity()), l = 0, factors[NUM_WARPS];

    __device__ __forceinline__ MergedWarps(const SharedPlan& shared, int row) {
        #pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp)
            m = shared.m[warp][row] > m ? shared.m[warp][row] : m;
        const Real base = m == -Real(infinity()) ? Real(0) : m;
        #pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp) {
            factors[warp] = exp(shared.m[warp][row] - base);
            l += shared.l[warp][row] * factors[warp];
        }
    }
};

// The part's rows, a warp a row.
__device__ __forceinline__ void store_part(
    const Arguments& args, const Part& part, const RowTile& rows, const SharedPlan& shared) {
    const int lane = threadIdx.x % 32;
    const Real v_scale = v_scale_of_head(args, rows.kv_head);
    for (int row = threadIdx.x / 32; row < BLOCK_Q && rows.exists(row); row += NUM_WARPS) {
        const MergedWarps merged(shared, row);
        const Result<Real> result(args, part, rows, row, merged.m, merged.l);
        if (lane == 0) result.store_lse();
        if (MAX_SCORE && lane == 0) result.store_max_score(merged.m, merged.l);
        for (int column = lane; column < args.arrays.shape.head_dim_v; column += 32) {
            Real sum = 0;
            #pragma unroll
            for (int warp = 0; warp < NUM_WARPS; ++warp)
                sum = fma(shared.acc[warp][row][column], merged.factors[warp], sum);
            result.store(column, sum * v_scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, BLOCKS_PER_SM)
forward_decode_simt(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    Parts parts(args);
    Part part;
    while (parts.next(part)) {
        const RowTile rows(args, part);
        WarpRows warp_rows(args.arrays, rows);
        compute_part(args, part, rows, warp_rows);
        griddepcontrol_launch_dependents();                 // of finish/merge_parts.cu
        share_state(shared, warp_rows);
        __syncthreads();
        store_part(args, part, rows, shared);
        __syncthreads();                                    // all states have been read
    }
}
