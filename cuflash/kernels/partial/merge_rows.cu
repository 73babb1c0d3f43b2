// Merges a result over some keys into one over others, as merge.cu does, for cuflash.distributed:
//
//     m = max(lse_a, lse_b),  w_a = exp(lse_a - m),  w_b = exp(lse_b - m)
//     result = (w_a a + w_b b) / (w_a + w_b),  lse_a = m + log(w_a + w_b)
//
// a may be of the accumulators' type, b is of the inputs' type, the result of either. The result
// may be a: each lane reads elements before it writes them. A side with lse = -inf takes no part;
// one with lse = inf makes the result NaN.
//
// Grid: a block for NUM_WARPS heads of a token, with head_blocks = ceil(num_heads / NUM_WARPS),
//     blockIdx.x = (batch_index * seqlen + token) * head_blocks + head / NUM_WARPS
// Block: NUM_THREADS threads, a multiple of 32; a warp for each head. Constants: Element, First,
// Result, VECTOR, NUM_THREADS. No shared memory.
//
// Bound by memory: a and b read once, the result written once.
#include "partial/rows.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(NUM_THREADS % 32 == 0, "whole warps");

inline Real infinity() { return __int_as_float(0x7f800000); }

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
merge_rows(const __grid_constant__ MergeRowsArguments args) {
    // In 32 bits: a warp moves too few bytes to hide 64-bit divisions.
    const int lane = threadIdx.x % 32, head_blocks = (args.num_heads - 1) / NUM_WARPS + 1;
    const int head = blockIdx.x % head_blocks * NUM_WARPS + threadIdx.x / 32;
    const u32 tokens = blockIdx.x / head_blocks;
    const int token = tokens % args.seqlen, batch = tokens / args.seqlen;
    if (head >= args.num_heads) return;

    Real* own_lse = static_cast<Real*>(args.lse_a)
                  + batch * args.lse_a_stride.batch + head * args.lse_a_stride.head + token;
    const Real lse_a = *own_lse;
    const Real lse_b = static_cast<const Real*>(args.lse_b)[
        batch * args.lse_b_stride.batch + head * args.lse_b_stride.head + token];
    const bool has_a = lse_a != -infinity(), has_b = lse_b != -infinity();
    const Real m = fmax(lse_a, lse_b);                      // skips NaN
    const Real w_a = has_a ? exp(lse_a - m) : Real(0), w_b = has_b ? exp(lse_b - m) : Real(0);
    const Real sum = w_a + w_b, inverse = Real(1) / sum;

    const int first = head * args.head_dim;
    const First* a = token_row(static_cast<const First*>(args.a), args.a_stride, batch, token);
    const Element* b = token_row(static_cast<const Element*>(args.b), args.b_stride, batch, token);
    Result* result =
        token_row(static_cast<Result*>(args.result), args.result_stride, batch, token);
    for (int column = lane * VECTOR; column < args.head_dim; column += 32 * VECTOR)
        combine(a + first, b + first, result + first, column, [&](Real x, Real y) {
            const Real weighted_sum = has_a ? has_b ? w_a * x + w_b * y : w_a * x : w_b * y;
            return has_a || has_b ? weighted_sum * inverse : Real(0);
        });
    __syncwarp();                                           // all lanes have read lse_a
    if (lane == 0)
        *own_lse = !has_a && !has_b ? -infinity() : m == infinity() ? m : m + log(sum);
}
