// Runs before the backward kernels: delta = rowsum(dO * O) (FlashAttention-2, arXiv:2307.08691,
// Alg. 2, line 4), in float, or in double for double elements. With DLSE, the gradient of lse is
// subtracted: dS = P (dP - delta) then has the term P dlse, as d lse / dS = P. It also zeroes what
// the main kernel adds to: sums of dQ (DQ_COLUMNS floats a row of every query tile) or dQ itself
// and, if not null, the block counter and semaphores of dq_semaphore.cuh.
//
// Block: NUM_THREADS threads; LANES of a warp share a row of out, in chunks of up to 16 bytes.
// Grid: blockIdx.x = row / (NUM_THREADS / LANES), rows being counted as in a contiguous array:
//     row = (batch * seqlen_q + query) * num_heads_q + head
// Constants: Element, NUM_THREADS, LANES, VECTOR elements of a lane, to which rows are aligned;
// BLOCK_Q, DQ_COLUMNS (0: no sums), ADDS_TO_DQ, DLSE; Arguments, its argument's type, and PACKED.
// No shared memory.
//
// Bound by memory: O and dO read once, the sums written once.
#include "prepare/clear_sums.cuh"
#include "prepare/delta.cuh"
#include "prepare/token_rows.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_delta(const __grid_constant__ Arguments args) {
    const BackwardArguments& arguments = arrays_of(args);
    if constexpr (DQ_COLUMNS > 0 || ADDS_TO_DQ) clear_sums(args);

    const Shape& shape = arguments.shape;
    const int lane = threadIdx.x % LANES;
    const auto [batch, query, head] = token_row(
        i64(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES, shape);
    const bool exists = batch < shape.batch;                // no return: all lanes join the sum

    const Strides &dos = arguments.dout_stride, &os = arguments.out_stride;
    const Element* dout = static_cast<const Element*>(arguments.dout)
                        + batch * dos.batch + query * dos.token + head * dos.head;
    const Element* out = static_cast<const Element*>(arguments.out)
                       + batch * os.batch + query * os.token + head * os.head;
    Real sum = row_sum(partial_product<VECTOR>(dout, out, lane, exists ? shape.head_dim_v : 0));
    Real* delta = static_cast<Real*>(arguments.delta);
    if (exists && lane == 0) {
        const i64 i = (batch * shape.num_heads_q + head) * shape.seqlen_q + query;
        if constexpr (DLSE) sum -= static_cast<const Real*>(args.dlse)[i];
        delta[i] = sum;
    }
}
