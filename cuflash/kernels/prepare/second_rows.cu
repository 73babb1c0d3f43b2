// Runs before sm90/double_backward.cu, after the JVP that computes b and ddO. Writes the SecondRows
// of each query tile and, for the kernels that compute flagged tiles anew (tile_flags.cuh),
//
//     delta = rowsum(dO * O) - dlse,  delta_dot = rowsum(dO * ddO)
//
// once more, by rows. Zeroes what the kernel adds to: the sums of d2Q, a counter, flags and
// semaphores (semaphores.cuh).
//
// Grid: one block per tile of BLOCK_Q queries of one head,
//     blockIdx.x = (batch * num_heads_q + head) * num_q_tiles + q_tile
// Block: NUM_THREADS threads; LANES of a warp share a row of out, in chunks of 16 bytes.
//
// Constants: Element, NUM_THREADS, LANES, BLOCK_Q, BLOCK_K; HEAD_DIM, columns of a row of the sums
// of d2Q; DQ_SEMAPHORES, semaphores of a query tile, 0 if d2Q is not DETERMINISTIC; DLSE;
// Arguments; SCORE_MOD, with which rows may have rests (lse_rest.cuh). No shared memory.
//
// Bound by memory: O, dO and ddO read once, the sums written once.
#include "sm90/second_rows.cuh"
#include "sm90/semaphores.cuh"
#include "common/softmax.cuh"
#include "common/tile_flags.cuh"
#include "prepare/delta.cuh"
#include "score/score_mod.cuh"

static_assert(NUM_THREADS >= BLOCK_Q, "a thread has the lse of at most one query");

// Zeroes the sums of d2Q of the block's tile, and the block's share of the counters.
__device__ __forceinline__ void clear_sums(const Arguments& args) {
    const BackwardArguments& arrays = args.arrays;
    float4* sums = static_cast<float4*>(arrays.dq_sum)
                 + static_cast<i64>(blockIdx.x) * (BLOCK_Q * HEAD_DIM / 4);
    #pragma unroll
    for (int i = threadIdx.x; i < BLOCK_Q * HEAD_DIM / 4; i += NUM_THREADS)
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int thread = blockIdx.x * NUM_THREADS + threadIdx.x, threads = gridDim.x * NUM_THREADS;
    const i64 num_flags = query_flag(args, arrays.shape.batch, 0, 0) - arrays.recompute_flags;
    if (thread == 0) *arrays.tile_counter = 0;
    for (i64 i = thread; i < num_flags; i += threads) arrays.recompute_flags[i] = 0;
    for (i64 i = thread; i < i64(gridDim.x) * DQ_SEMAPHORES; i += threads)
        arrays.dq_semaphores[i] = 0;
}

// One row of dO, O and ddO, of which the caller has chunks: D and F, in each of the row's lanes.
__device__ __forceinline__ void row_products(
    const Arguments& args, int batch, int head, int query, int columns, float& delta,
    float& product) {
    const BackwardArguments& arrays = args.arrays;
    const Strides &dos = arrays.dout_stride, &os = arrays.out_stride;
    const DirectionStrides& ddos = args.tangents.out_dot;
    const Element* dout = static_cast<const Element*>(arrays.dout)
                        + batch * dos.batch + query * dos.token + head * dos.head;
    const Element* out = static_cast<const Element*>(arrays.out)
                       + batch * os.batch + query * os.token + head * os.head;
    const Element* ddout = static_cast<const Element*>(args.out_dot)
                         + batch * ddos.batch + query * ddos.token + head * ddos.head;
    const int lane = threadIdx.x % LANES;
    delta = row_sum(partial_product(dout, out, lane, columns));
    product = row_sum(partial_product(dout, ddout, lane, columns));
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
double_backward_rows(const __grid_constant__ Arguments args) {
    const Shape& shape = args.arrays.shape;
    const int num_q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    const int q_start = blockIdx.x % num_q_tiles * BLOCK_Q;
    const int pair = blockIdx.x / num_q_tiles;
    const int head = pair % shape.num_heads_q, batch = pair / shape.num_heads_q;
    const i64 first_row = i64{pair} * shape.seqlen_q + q_start;
    const int num_rows = min(BLOCK_Q, shape.seqlen_q - q_start), thread = threadIdx.x;
    SecondRows& rows = static_cast<SecondRows*>(args.query_rows)[blockIdx.x];

    clear_sums(args);
    float lse = infinity(), b = 0.0f;                       // past the end: P = 0
    if (thread < num_rows) {
        lse = effective_lse(static_cast<const float*>(args.arrays.lse)[first_row + thread]);
        b = static_cast<const float*>(args.lse_dot)[first_row + thread];
    }
    LseRests<float> rests;
    rests.set_head(args, batch, head);
    const float magnitude = fabsf(lse * LOG2_E);
    const bool has_large_lse = __syncthreads_or(magnitude > MAX_FUSED_LSE && lse < infinity());
    if (thread < BLOCK_Q) {
        rows.lse[thread] = has_large_lse ? lse : lse * LOG2_E;
        rows.b[thread] = b;
        rows.set_rest(thread, rests.of(q_start + thread, lse));
    }
    if (thread == 0) {
        rows.has_large_lse = has_large_lse;
        rows.scale = LINEAR ? static_cast<float>(args.arrays.scale) : 1.0f;
        rows.q_start = q_start;
        rows.head = head;
    }

    #pragma unroll 2
    for (int i = thread / LANES; i < BLOCK_Q; i += NUM_THREADS / LANES) {
        float delta, product;
        row_products(args, batch, head, q_start + i, i < num_rows ? shape.head_dim_v : 0, delta,
                     product);
        if (thread % LANES != 0) continue;
        if (i < num_rows) {
            if (DLSE) delta -= static_cast<const float*>(args.dlse)[first_row + i];
            static_cast<float*>(args.arrays.delta)[first_row + i] = delta;
            static_cast<float*>(args.delta_dot)[first_row + i] = product;
        }
        rows.delta[i] = delta;
        rows.product[i] = product;
    }
}
