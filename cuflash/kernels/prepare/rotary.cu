// Rotary position embedding (RoFormer, arXiv:2104.09864, eq. 34). Each pair (a, b) of a row's
// columns is rotated by an angle of the token's position:
//
//     a' = a cos - b sin,  b' = a sin + b cos        inverse: -sin
//
// Pair i is (2i, 2i + 1) or (i, i + num_pairs); columns from 2 num_pairs on are copied. A position
// outside cos and sin makes the pairs of its rows NaN. out may be x: each thread reads a pair and
// then writes it.
//
// Grid: a block for NUM_WARPS heads of a token, with head_blocks = ceil(num_heads / NUM_WARPS),
//     blockIdx.x = (batch_index * seqlen + token) * head_blocks + head / NUM_WARPS
// Block: NUM_THREADS threads, a multiple of 32; a warp for each head.
// Constants: Element, Table (of cos and sin), Index (of positions), NUM_THREADS. No shared memory.
//
// Bound by memory: x read once and out written once, element by element.
#include "prepare/rotary.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(NUM_THREADS % 32 == 0, "whole warps");

// A token's row of cos and sin.
inline i64 position_of(const RotaryArguments& args, i64 batch, i64 token) {
    if (args.positions == nullptr) return token;
    const TokenStrides& stride = args.positions_stride;
    return static_cast<const Index*>(args.positions)[batch * stride.batch + token * stride.token];
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
rotary(const __grid_constant__ RotaryArguments args) {
    // In 32 bits: a warp moves too few bytes to hide 64-bit divisions.
    const int lane = threadIdx.x % 32, head_blocks = (args.num_heads - 1) / NUM_WARPS + 1;
    const int head = blockIdx.x % head_blocks * NUM_WARPS + threadIdx.x / 32;
    const u32 tokens = blockIdx.x / head_blocks;
    const int token = tokens % args.seqlen, batch = tokens / args.seqlen;
    if (head >= args.num_heads) return;

    const Element* x = static_cast<const Element*>(args.x)
                     + row_offset(args.x_stride, batch, token, head);
    Element* out = static_cast<Element*>(args.out)
                 + row_offset(args.out_stride, batch, token, head);
    const i64 x_column = args.x_stride.column, out_column = args.out_stride.column;
    const i64 position = position_of(args, batch, token);

    const RotaryTables tables{args.cos, args.sin, args.cos_stride, args.sin_stride,
                              args.num_positions};
    for (int pair = lane; pair < args.num_pairs; pair += 32) {
        const int first = pair * args.pair_step, second = first + args.pair_width;
        const Rotation rotation = tables.rotation(position, pair, args.inverse);
        const Real a = to_accumulator(x[first * x_column]);
        const Real b = to_accumulator(x[second * x_column]);
        out[first * out_column] = from_accumulator<Element>(rotation.first(a, b));
        out[second * out_column] = from_accumulator<Element>(rotation.second(a, b));
    }
    for (int column = 2 * args.num_pairs + lane; column < args.head_dim; column += 32)
        out[column * out_column] = x[column * x_column];
}
