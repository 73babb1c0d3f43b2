// Merges results over some keys into one over others, as merge.cu does, for cuflash.distributed.
// With a and up to three b's as x_i:
//
//     m = max lse_i,  w_i = exp(lse_i - m)
//     result = sum w_i x_i / sum w_i,  lse_a = m + log(sum w_i)
//
// a may be of the accumulators' type, the others are of the inputs' type, the result of either. The
// result may be a: each lane reads elements before it writes them. An x_i with lse = -inf takes no
// part; one with lse = inf makes the result NaN.
//
// Grid: a block for NUM_WARPS heads of a token, with head_blocks = ceil(num_heads / NUM_WARPS),
//     blockIdx.x = (batch_index * seqlen + token) * head_blocks + head / NUM_WARPS
// Block: NUM_THREADS threads, a multiple of 32; a warp for each head. No shared memory.
// Constants: Element, First, Result, COUNT, VECTOR, NUM_THREADS.
//
// Bound by memory: each array read once, the result written once.
#include "partial/rows.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(NUM_THREADS % 32 == 0, "whole warps");

inline Real infinity() { return __int_as_float(0x7f800000); }

// Where the lse of a token and a head stands.
inline i64 lse_index(const HeadStrides& stride, i64 batch, i64 head, int token) {
    return batch * stride.batch + head * stride.head + token;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
merge_rows(const __grid_constant__ MergeRowsArguments args) {
    // In 32 bits: a warp moves too few bytes to hide 64-bit divisions.
    const int lane = threadIdx.x % 32, head_blocks = (args.num_heads - 1) / NUM_WARPS + 1;
    const int head = blockIdx.x % head_blocks * NUM_WARPS + threadIdx.x / 32;
    const u32 tokens = blockIdx.x / head_blocks;
    const int token = tokens % args.seqlen, batch = tokens / args.seqlen;
    if (head >= args.num_heads) return;

    const void* const lses[MOST_OTHERS] = {args.lse_b0, args.lse_b1, args.lse_b2};
    const HeadStrides strides[MOST_OTHERS] = {
        args.lse_b0_stride, args.lse_b1_stride, args.lse_b2_stride};
    Real* own_lse =
        static_cast<Real*>(args.lse_a) + lse_index(args.lse_a_stride, batch, head, token);
    Real lse[1 + COUNT] = {*own_lse}, weight[1 + COUNT];
    #pragma unroll
    for (int i = 0; i < COUNT; ++i)
        lse[1 + i] =
            static_cast<const Real*>(lses[i])[lse_index(strides[i], batch, head, token)];
    Real m = lse[0], sum = 0;
    #pragma unroll
    for (int i = 1; i <= COUNT; ++i) m = fmax(m, lse[i]);   // skips NaN
    #pragma unroll
    for (int i = 0; i <= COUNT; ++i) {
        weight[i] = lse[i] != -infinity() ? exp(lse[i] - m) : Real(0);
        sum += weight[i];
    }
    const Real inverse = sum != Real(0) ? Real(1) / sum : Real(0);

    const Rows rows(args, batch, token, head * args.head_dim);
    for (int column = lane * VECTOR; column < args.head_dim; column += 32 * VECTOR)
        rows.combine(column, [&](const Real (&elements)[1 + COUNT]) {
            Real weighted_sum = 0;
            #pragma unroll
            for (int i = 0; i <= COUNT; ++i)
                if (lse[i] != -infinity()) weighted_sum += weight[i] * elements[i];
            return weighted_sum * inverse;
        });
    __syncwarp();                                           // all lanes have read lse_a
    if (lane == 0) *own_lse = sum == Real(0) || m == infinity() ? m : m + log(sum);
}
