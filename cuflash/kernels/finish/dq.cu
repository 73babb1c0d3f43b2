// dQ from its sums: scales by the softmax scale, rounds, and stores rows in the array's order.
//
// Runs after sm80/backward.cu, sm90/backward.cu or sm90/backward_wide.cu, which add to the sums in
// the order of their fragments (dq_accum.cuh). After the sm90 kernels the sums may be integers
// (integer_dq.cuh), and it also RECOMPUTES rows of dQ, dK and dV (recompute.cuh).
//
// Grid: one block per tile of BLOCK_Q queries of one head,
//     blockIdx.x = (batch * num_heads_q + head) * num_q_tiles + q_tile
// and, if it RECOMPUTES, then one per tile of BLOCK_K keys of one key head, in the same order.
// Block: NUM_WARPS warps, which hold dQ as they did when it was summed.
//
// Constants: Element, HEAD_DIM, BLOCK_Q, NUM_WARPS and SCORE_WARPS_Q as in the summing kernel;
// Arguments and the options; RECOMPUTES, and if so its CAUSAL, HEAD_DIM_V, BLOCK_K, DLSE and
// DQ_SEMAPHORES; INTEGER_DQ, which implies that; SHARED_BYTES.
// Shared memory: the tile of dQ, BLOCK_Q * HEAD_DIM * 2 bytes, with HEAD_DIM rounded up to a
// multiple of 64 (smem.cuh).
//
// Bound by memory: 4 bytes read and 2 written per element.
#include "sm90/semaphores.cuh"
#include "common/dq_accum.cuh"
#include "sm90/integer_dq.cuh"
#include "finish/recompute.cuh"
#include "common/packed_sequences.cuh"

// With windows and segments this kernel is a larger share of the time. Three blocks per SM keep
// memory busier: 52 us instead of 58 for 16,384 tokens of 16 heads. Recomputing then spills.
constexpr int BLOCKS_PER_SM = WINDOW || SKIPS_TILES ? 3 : 0;   // 0: no minimum

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> dq;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Recomputes rows of dV and dK of a key tile, counted over all key heads, if it is flagged.
__device__ __forceinline__ void recompute_keys(const Arguments& whole, int index) {
    const int tiles = num_key_tiles(whole, BLOCK_K);
    int tile = index % tiles;
    const int pair = index / tiles, num_heads = arrays_of(whole).shape.num_heads_kv;
    const int head = pair % num_heads, batch = pair / num_heads;
    if (*recompute_flag(whole, {tile, head, batch}) == 0) return;
    const auto sequence = sequence_of_tile<true>(whole, tile, BLOCK_K);
    const Arguments& args = sequence_arguments(whole, sequence, BLOCK_Q);
    const Shape& shape = arrays_of(args).shape;
    const int end = min((tile + 1) * BLOCK_K, shape.seqlen_k);
    for (int key = tile * BLOCK_K + threadIdx.x / 32; key < end; key += NUM_WARPS)
        recompute_key(args, batch, head, key);
}

// INTEGER_DQ: the index of a tile, which is counted within its sequence, among those of its head.
inline int slot_of(NoSequence, int tile) { return tile; }
inline int slot_of(const Sequence& sequence, int tile) { return sequence.first_slot + tile; }

// INTEGER_DQ: four sums of a thread's fragment.
__device__ __forceinline__ int4 read_sums(const int* sums, int lane) {
    if (!BY_LANES) return *reinterpret_cast<const int4*>(sums + lane * 4);
    return int4{sums[lane], sums[lane + 32], sums[lane + 64], sums[lane + 96]};
}

// INTEGER_DQ: dQ from its integers. Rows without a grid become NaN, which are then recomputed.
// Returns whether the thread's rows have grids.
__device__ __forceinline__ bool read_integers(
    QueryGrid::Fragments& dq, const Arguments& whole, i64 tile, float scale) {
    const QueryRows& rows = static_cast<const QueryRows*>(arrays_of(whole).delta)[tile];
    const int lane = threadIdx.x % 32, row = QueryGrid::first_row() + lane / 4;
    const int* first = static_cast<const int*>(arrays_of(whole).dq_sum) + tile * SUMS_OF_TILE
                     + (dq_sum_first(threadIdx.x) - lane * 4);
    const DqGrid grids[2] = {{rows.grid(row)}, {rows.grid(row + 8)}};
    const bool is_wide = grids[0].is_wide();
    #pragma unroll
    for (int n = 0; n < QueryGrid::N_TILES; ++n) {
        const int4 high = read_sums(first + dq_sum_step(0, n), lane);
        int4 low = {0, 0, 0, 0};
        if (is_wide) low = read_sums(first + low_sums_distance(whole) + dq_sum_step(0, n), lane);
        const int highs[4] = {high.x, high.y, high.z, high.w};
        const int lows[4] = {low.x, low.y, low.z, low.w};
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float sum = sum_of_limbs(highs[i], lows[i], grids[i / 2].inverse_steps());
            dq[0][n][i] = grids[i / 2].exists() ? sum * scale : quiet_nan();
        }
    }
    return grids[0].exists() && grids[1].exists();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_dq(const __grid_constant__ Arguments whole) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 dq_tile = shared_address(&reinterpret_cast<SharedPlan*>(shared_bytes)->dq);

    const int num_q_tiles = num_query_tiles(whole, BLOCK_Q);
    int tile = blockIdx.x % num_q_tiles;
    const int pair = blockIdx.x / num_q_tiles;
    if (RECOMPUTES && PACKED && pair >= arrays_of(whole).shape.num_heads_q)
        return recompute_keys(whole, blockIdx.x - arrays_of(whole).shape.num_heads_q * num_q_tiles);
    const auto sequence = sequence_of_block<false>(whole, tile, BLOCK_Q, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(whole, sequence, BLOCK_Q, BLOCK_Q * HEAD_DIM);
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const int head = pair % shape.num_heads_q, batch = pair / shape.num_heads_q;
    if (RECOMPUTES && !PACKED && batch >= shape.batch)
        return recompute_keys(args, blockIdx.x - shape.batch * shape.num_heads_q * num_q_tiles);
    const float* sums =
        dq_sum_tile(arguments.dq_sum, PACKED ? i64(pair) * num_q_tiles + tile : blockIdx.x)
        + dq_sum_first(threadIdx.x);
    const float scale = static_cast<float>(arguments.scale);

    bool finite = true;
    QueryGrid::Fragments dq;
    if constexpr (INTEGER_DQ) {
        finite = read_integers(
            dq, whole, i64(pair) * num_q_tiles + slot_of(sequence, tile), scale);
    } else {
        #pragma unroll
        for (int m = 0; m < QueryGrid::M_TILES; ++m)
            #pragma unroll
            for (int n = 0; n < QueryGrid::N_TILES; ++n) {
                const float4 sum = *reinterpret_cast<const float4*>(sums + dq_sum_step(m, n));
                dq[m][n][0] = sum.x * scale;
                dq[m][n][1] = sum.y * scale;
                dq[m][n][2] = sum.z * scale;
                dq[m][n][3] = sum.w * scale;
                if (RECOMPUTES)
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) finite &= !is_nonfinite(dq[m][n][i]);
            }
    }
    Packed<QueryGrid::M_TILES, QueryGrid::N_TILES> packed;
    pack_fragments<Element>(packed, dq);
    store_fragments<BLOCK_Q>(dq_tile, packed, QueryGrid::first_row(), QueryGrid::first_column());
    const bool needs_recompute = __syncthreads_or(!finite);

    const Strides stride = arguments.dq_stride;
    const i64 first_row = static_cast<i64>(tile) * BLOCK_Q;
    u16* rows = static_cast<u16*>(arguments.dq)
              + batch * stride.batch + head * stride.head + first_row * stride.token;
    store_tile<BLOCK_Q, HEAD_DIM, THREADS, BLOCK_Q>(
        dq_tile, 0, rows, stride.token, shape.seqlen_q - tile * BLOCK_Q, shape.head_dim,
        rows_aligned(arguments.dq, stride), threadIdx.x);

    if (RECOMPUTES && needs_recompute) {
        __syncthreads();
        const int end = min((tile + 1) * BLOCK_Q, shape.seqlen_q);
        for (int query = tile * BLOCK_Q + threadIdx.x / 32; query < end; query += NUM_WARPS)
            recompute_query(args, batch, head, query);
    }
}
