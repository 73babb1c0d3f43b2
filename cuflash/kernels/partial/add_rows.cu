// Adds gradients of some blocks to those of others, for cuflash.distributed: result = a + b.
//
// a may be of the accumulators' type, b is of the inputs' type, the result of either. The result
// may be a: each thread reads elements before it writes them.
//
// Grid: BLOCK_COLUMNS = NUM_THREADS * VECTOR columns of a token,
//     blockIdx.x = (batch_index * seqlen + token) * ceil(columns / BLOCK_COLUMNS) + part
// Block: NUM_THREADS threads. Constants: Element, First, Result, VECTOR, NUM_THREADS. No shared
// memory.
//
// Bound by memory: a and b read once, the result written once.
#include "partial/rows.cuh"

constexpr int BLOCK_COLUMNS = NUM_THREADS * VECTOR;

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
add_rows(const __grid_constant__ AddRowsArguments args) {
    const int parts = (args.columns - 1) / BLOCK_COLUMNS + 1, part = blockIdx.x % parts;
    const int row = blockIdx.x / parts, token = row % args.seqlen, batch = row / args.seqlen;
    const int column = part * BLOCK_COLUMNS + threadIdx.x * VECTOR;
    if (column >= args.columns) return;
    combine(token_row(static_cast<const First*>(args.a), args.a_stride, batch, token),
            token_row(static_cast<const Element*>(args.b), args.b_stride, batch, token),
            token_row(static_cast<Result*>(args.result), args.result_stride, batch, token),
            column, [](Real x, Real y) { return x + y; });
}
