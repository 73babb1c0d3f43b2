// Adds gradients of some blocks to those of others, for cuflash.distributed:
//
//     result = a + b0, or a + b0 + b1, or a + b0 + b1 + b2
//
// a may be of the accumulators' type, the others are of the inputs' type, the result of either. The
// result may be a: each thread reads elements before it writes them.
//
// Grid: BLOCK_COLUMNS = NUM_THREADS * VECTOR columns of a token,
//     blockIdx.x = (batch_index * seqlen + token) * ceil(columns / BLOCK_COLUMNS) + part
// Block: NUM_THREADS threads. No shared memory.
// Constants: Element, First, Result, COUNT, VECTOR, NUM_THREADS.
//
// Bound by memory: each array read once, the result written once.
#include "partial/rows.cuh"

constexpr int BLOCK_COLUMNS = NUM_THREADS * VECTOR;

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
add_rows(const __grid_constant__ AddRowsArguments args) {
    const int parts = (args.columns - 1) / BLOCK_COLUMNS + 1, part = blockIdx.x % parts;
    const int row = blockIdx.x / parts, token = row % args.seqlen, batch = row / args.seqlen;
    const int column = part * BLOCK_COLUMNS + threadIdx.x * VECTOR;
    if (column >= args.columns) return;
    Rows(args, batch, token).combine(column, [](const Real (&elements)[1 + COUNT]) {
        Real sum = elements[0];
        #pragma unroll
        for (int i = 1; i <= COUNT; ++i) sum += elements[i];
        return sum;
    });
}
