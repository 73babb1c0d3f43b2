// Two results over disjoint sets of keys, merged (Milakov & Gimelshein 2018, arXiv:1805.02867,
// section 3.1, with m = lse and a sum of 1):
//
//     m = max(lse_a, lse_b),  w_a = exp(lse_a - m),  w_b = exp(lse_b - m)
//     out = (w_a out_a + w_b out_b) / (w_a + w_b),  lse = m + log(w_a + w_b)
//
// A side with lse = inf makes the weights NaN and lse inf.
// A side with lse = -inf has no visible key and takes no part, whatever its out is: the result is
// bitwise the other side. If both are such, out is 0 and lse -inf.
//
// Grid: one warp per row of out, blockIdx.x = row / (NUM_THREADS / 32), the rows counted as
//     row = (batch_index * seqlen_q + query) * num_heads_q + head
// Block: NUM_THREADS threads, a multiple of 32. Constants: Element, NUM_THREADS. No shared memory.
#include "common/types.cuh"
#include "common/elements.cuh"

using Real = Accumulator<Element>;

static_assert(NUM_THREADS % 32 == 0, "whole warps");

inline Real infinity() { return __int_as_float(0x7f800000); }

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
merge(const __grid_constant__ MergeArguments arguments) {
    const int num_heads = arguments.num_heads_q, seqlen_q = arguments.seqlen_q;
    const int head_dim = arguments.head_dim_v, lane = threadIdx.x % 32;
    const i64 row = i64(blockIdx.x) * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= i64(arguments.batch) * seqlen_q * num_heads) return;
    const i64 head = row % num_heads, query = row / num_heads % seqlen_q;
    const i64 batch = row / num_heads / seqlen_q;

    const i64 index = (batch * num_heads + head) * seqlen_q + query;
    const Real lse_a = static_cast<const Real*>(arguments.lse_a)[index];
    const Real lse_b = static_cast<const Real*>(arguments.lse_b)[index];
    const bool has_a = lse_a != -infinity(), has_b = lse_b != -infinity();
    const Real m = fmax(lse_a, lse_b);                      // skips NaN
    const Real w_a = has_a ? exp(lse_a - m) : Real(0), w_b = has_b ? exp(lse_b - m) : Real(0);
    const Real sum = w_a + w_b;

    const Element* a = static_cast<const Element*>(arguments.out_a) + row * head_dim;
    const Element* b = static_cast<const Element*>(arguments.out_b) + row * head_dim;
    Element* out = static_cast<Element*>(arguments.out) + row * head_dim;
    for (int d = lane; d < head_dim; d += 32) {
        const Real x = w_a * to_accumulator(a[d]), y = w_b * to_accumulator(b[d]);
        const Real weighted_sum = has_a ? has_b ? x + y : x : has_b ? y : Real(0);
        out[d] = from_accumulator<Element>(has_a || has_b ? weighted_sum / sum : Real(0));
    }
    if (lane == 0)
        static_cast<Real*>(arguments.lse)[index] =
            !has_a && !has_b ? -infinity() : m == infinity() ? m : m + log(sum);
}
