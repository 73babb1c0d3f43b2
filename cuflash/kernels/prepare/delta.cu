// Runs before the backward kernels: delta = rowsum(dO * O) (FlashAttention-2, arXiv:2307.08691,
// Alg. 2, line 4), in float, or in double for double elements. With DLSE, the gradient of lse is
// subtracted: dS = P (dP - delta) then has the term P dlse, as d lse / dS = P. It also zeroes what
// the main kernel adds to: sums of dQ (DQ_COLUMNS floats a row of every query tile) or dQ itself
// and, if not null, the block counter and semaphores of dq_semaphore.cuh.
//
// Block: NUM_THREADS threads; LANES of a warp share a row of out, in chunks of up to 16 bytes.
// Grid: blockIdx.x = row / (NUM_THREADS / LANES), rows being counted as in a contiguous array:
//     row = (batch * seqlen_q + query) * num_heads_q + head
// Constants: Element, NUM_THREADS, LANES, BLOCK_Q, DQ_COLUMNS (0: no sums), ADDS_TO_DQ, DLSE;
// Arguments, its argument's type, and PACKED. No shared memory.
//
// Bound by memory: O and dO read once, the sums written once.
#include "prepare/delta.cuh"
#include "common/packed_sequences.cuh"

// Zeroes what the main kernel adds to; each thread of the grid has a share. dQ is contiguous:
// execute.py sees to it.
inline void clear_sums(const Arguments& args) {
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const i64 num_q_tiles = num_query_tiles(args, BLOCK_Q);
    const i64 heads = i64(shape.batch) * shape.num_heads_q, tiles = num_q_tiles * heads;
    const i64 thread = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const i64 threads = i64(gridDim.x) * NUM_THREADS;
    if constexpr (ADDS_TO_DQ) {
        Element* dq = static_cast<Element*>(arguments.dq);
        for (i64 i = thread; i < heads * shape.seqlen_q * shape.head_dim; i += threads) dq[i] = {};
    } else {
        float4* sums = static_cast<float4*>(arguments.dq_sum);
        for (i64 i = thread; i < tiles * (BLOCK_Q * DQ_COLUMNS / 4); i += threads)
            sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (arguments.dq_semaphores == nullptr) return;
    if (thread == 0) *arguments.tile_counter = 0;
    for (i64 i = thread; i < tiles; i += threads) arguments.dq_semaphores[i] = 0;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_delta(const __grid_constant__ Arguments args) {
    const BackwardArguments& arguments = arrays_of(args);
    if constexpr (DQ_COLUMNS > 0 || ADDS_TO_DQ) clear_sums(args);

    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % LANES;
    const i64 row = i64(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES;
    const i64 head = row % shape.num_heads_q;
    const i64 query = row / shape.num_heads_q % shape.seqlen_q;
    const i64 batch = row / shape.num_heads_q / shape.seqlen_q;
    const bool exists = batch < shape.batch;                // no return: all lanes join the sum

    const Strides &dos = arguments.dout_stride, &os = arguments.out_stride;
    const Element* dout = static_cast<const Element*>(arguments.dout)
                        + batch * dos.batch + query * dos.token + head * dos.head;
    const Element* out = static_cast<const Element*>(arguments.out)
                       + batch * os.batch + query * os.token + head * os.head;
    Real sum = row_sum(partial_product(dout, out, lane, exists ? shape.head_dim_v : 0));
    Real* delta = static_cast<Real*>(arguments.delta);
    if (exists && lane == 0) {
        const i64 i = (batch * shape.num_heads_q + head) * shape.seqlen_q + query;
        if constexpr (DLSE) sum -= static_cast<const Real*>(args.dlse)[i];
        delta[i] = sum;
    }
}
