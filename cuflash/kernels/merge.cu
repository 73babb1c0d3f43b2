// Results over disjoint sets of keys, merged (Milakov & Gimelshein 2018, arXiv:1805.02867,
// section 3.1, with m = lse and a sum of 1), as merged_row.cuh does:
//
//     m = max_i lse_i,  w_i = exp(lse_i - m)
//     out = sum_i w_i out_i / sum_i w_i,  lse = m + log(sum_i w_i)
//
// A state with lse = inf makes out NaN and lse inf.
// A state with lse = -inf has no visible key and takes no part, whatever its out is: the result is
// bitwise the one state that is left. If none is, out is 0 and lse -inf.
//
// Grid: one warp per row of out, blockIdx.x = row / (NUM_THREADS / 32), the rows counted as
//     row = (batch_index * seqlen_q + query) * num_heads_q + head
// Block: NUM_THREADS threads, a multiple of 32. Constants: Element, NUM_THREADS; LANES, the states
// whose weights are computed at once; Arguments. No shared memory.
//
// Bound by memory: each array is read once. Weak where head_dim is above 32 COLUMNS: weights are
// computed once for so many columns.
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "common/merged_row.cuh"

using Real = Accumulator<Element>;

constexpr int COLUMNS = 2;                                  // of a lane, at once

static_assert(NUM_THREADS % 32 == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
merge(const __grid_constant__ Arguments args) {
    const int num_heads = args.num_heads_q, seqlen_q = args.seqlen_q;
    const int head_dim = args.head_dim_v, lane = threadIdx.x % 32;
    const i64 row = i64(blockIdx.x) * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= i64(args.batch) * seqlen_q * num_heads) return;
    const i64 head = row % num_heads, query = row / num_heads % seqlen_q;
    const i64 batch = row / num_heads / seqlen_q;

    const i64 index = (batch * num_heads + head) * seqlen_q + query;
    for (int start = 0; start < head_dim; start += 32 * COLUMNS) {
        MergedRow<Real, COLUMNS, LANES> merged;
        for (int first = 0; first < args.num_states; first += LANES) {
            const int count = min(args.num_states - first, LANES), state = lane % LANES;
            const Real lse = state < count
                ? static_cast<const Real*>(args.lses[first + state])[index] : -Real(infinity());
            merged.add(count, lse, [&](int state, int i) {
                const int column = start + i * 32 + lane;
                const Element* out = static_cast<const Element*>(args.outs[first + state]);
                return column < head_dim ? to_accumulator(out[row * head_dim + column]) : Real(0);
            });
        }
        const Real m = merged.m, sum = merged.sum;
        Element* out = static_cast<Element*>(args.out) + row * head_dim;
        #pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int column = start + i * 32 + lane;
            if (column < head_dim)
                out[column] = from_accumulator<Element>(merged.column(i) / (sum == 0 ? 1 : sum));
        }
        if (start == 0 && lane == 0)
            static_cast<Real*>(args.lse)[index] = sum == 0 || m == infinity() ? m : m + log(sum);
    }
}
