// Runs before sm90/backward.cu, backward_wide.cu and backward_passes.cu. Writes the QueryRows of
// each query tile, and zeroes what these kernels add to: the sums of dQ, a counter, flags and
// semaphores (semaphores.cuh).
//
//     delta = rowsum(dO * O)          (FlashAttention-2, arXiv:2307.08691, Alg. 2, line 4)
//     delta = rowsum(dO * O) - dlse   with DLSE: d lse / dS = P adds P dlse to dS
//
// Grid: one block per tile of BLOCK_Q queries of one head,
//     blockIdx.x = (batch * num_heads_q + head) * num_q_tiles + q_tile
// Block: NUM_THREADS threads; LANES of a warp share a row of out, in chunks of 16 bytes.
//
// Constants: Element, NUM_THREADS, LANES, BLOCK_Q, BLOCK_K, HEAD_DIM; DQ_COLUMNS of a row of the
// sums of dQ, 0 if there are none; DQ_SEMAPHORES, semaphores of a query tile, 0 if dQ is not
// DETERMINISTIC; PART_SEMAPHORES of a key tile (backward_parts.cuh); INTEGER_DQ, and if so
// its CAUSAL; DLSE; Arguments, the type of the kernel's argument, and the options
// (docs/guide/options.md). No shared memory.
//
// Bound by memory: O and dO read once, the sums written once.
#include "sm90/semaphores.cuh"
#include "score/pair_mask.cuh"
#include "prepare/row_grids.cuh"
#include "common/softmax.cuh"
#include "score/score_mod.cuh"
#include "common/packed_sequences.cuh"

static_assert(NUM_THREADS >= BLOCK_Q, "a thread has the lse of at most one query");

// Zeroes the sums of dQ of the block's tile, and the block's share of the counters.
__device__ __forceinline__ void clear_sums(const Arguments& args) {
    const BackwardArguments& arguments = args.arrays;
    float4* sums = static_cast<float4*>(arguments.dq_sum)
                 + static_cast<i64>(blockIdx.x) * (BLOCK_Q * DQ_COLUMNS / 4);
    #pragma unroll
    for (int i = threadIdx.x; i < BLOCK_Q * DQ_COLUMNS / 4; i += NUM_THREADS)
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int thread = blockIdx.x * NUM_THREADS + threadIdx.x, threads = gridDim.x * NUM_THREADS;
    const i64 num_flags = (recompute_flag(args, {0, 0, arguments.shape.batch})
                           - arguments.recompute_flags) * (1 + PART_SEMAPHORES);
    if (thread == 0) *arguments.tile_counter = 0;
    for (i64 i = thread; i < num_flags; i += threads) arguments.recompute_flags[i] = 0;
    for (i64 i = thread; i < i64(gridDim.x) * DQ_SEMAPHORES; i += threads)
        arguments.dq_semaphores[i] = 0;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_rows(const __grid_constant__ Arguments args) {
    const BackwardArguments& arguments = args.arrays;
    const Shape& shape = arguments.shape;
    const int num_q_tiles = num_query_tiles(args, BLOCK_Q);
    int tile = blockIdx.x % num_q_tiles;
    const int pair = blockIdx.x / num_q_tiles;
    const int head = pair % shape.num_heads_q, batch = pair / shape.num_heads_q;
    // A slot without a tile gets rows like those past the end, with P = 0: a key tile that no query
    // sees visits one such slot (query_tiles() in backward_scheduler.cuh).
    const auto sequence = sequence_of_tile<false>(args, tile, BLOCK_Q);
    const int seqlen_q = seqlen_q_of(args, sequence), first_q = sequence.first_q;
    const int num_rows = min(BLOCK_Q, seqlen_q - tile * BLOCK_Q), thread = threadIdx.x;
    QueryRows& rows = static_cast<QueryRows*>(arguments.delta)[blockIdx.x];

    clear_sums(args);
    float lse = infinity();
    if (thread < num_rows)
        lse = effective_lse(static_cast<const float*>(arguments.lse)[
            static_cast<i64>(pair) * shape.seqlen_q + first_q + tile * BLOCK_Q + thread]);
    LseRests<float> rests;
    rests.set_head(args, batch, head);
    const float rest = rests.of(first_q + tile * BLOCK_Q + thread, lse);
    const float magnitude = fabsf(lse * LOG2_E);
    const bool has_large_lse = __syncthreads_or(magnitude > MAX_FUSED_LSE && lse < infinity());
    if (thread < BLOCK_Q) rows.lse[thread] = has_large_lse ? lse : lse * LOG2_E;
    if (thread < BLOCK_Q) rows.set_rest(thread, rest);
    if constexpr (SEGMENTS)
        if (thread < num_rows)
            rows.set_id(thread, PairMask(args, batch).id_of_query(tile * BLOCK_Q + thread));
    if (thread == 0) {
        rows.has_large_lse = has_large_lse;
        rows.scale = LINEAR ? static_cast<float>(arguments.scale) : 1.0f;
        rows.q_start = tile * BLOCK_Q;
        rows.head = head;
    }

    constexpr int PARALLEL_ROWS = NUM_THREADS / LANES;
    const Strides &dos = arguments.dout_stride, &os = arguments.out_stride;
    const int lane = thread % LANES;
    #pragma unroll 4
    for (int i = thread / LANES; i < BLOCK_Q; i += PARALLEL_ROWS) {
        const i64 query = first_q + tile * BLOCK_Q + i;
        const Element* dout = static_cast<const Element*>(arguments.dout)
                            + batch * dos.batch + query * dos.token + head * dos.head;
        const Element* out = static_cast<const Element*>(arguments.out)
                           + batch * os.batch + query * os.token + head * os.head;
        const int columns = i < num_rows ? shape.head_dim_v : 0;
        const RowProducts products(dout, out, lane, columns);
        float sum = row_sum(products.dout_out);
        if (DLSE && i < num_rows)
            sum -= static_cast<const float*>(args.dlse)[
                static_cast<i64>(pair) * shape.seqlen_q + query];
        if (lane == 0) rows.delta[i] = sum;
        products.store_norm(rows, i, lane);
    }
    set_grids(args, sequence, batch, head, tile, rows, rest == 0 ? lse : 0.0f);
}
