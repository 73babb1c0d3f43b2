// sm80/jvp.cu's epilogue: O, lse and their tangents to global memory.
#pragma once
#include "sm80/jvp_softmax.cuh"
#include "common/packed_sequences.cuh"
#include "score/sink.cuh"

// acc = O and acc_dot = O' of one row of the lane, and lse and lse' = b. Directions count from
// `direction` on.
//
//     O = acc / l,  b - r = b_rel / l,  O' = acc_dot / l - (b - r) O
//
// since the references r of W cancel in O'. l includes a sink's weight, whose tangent s' enters b.
// Without a key, or with scores of -inf only, l is 0 and the sums are 0 or NaN: they are the
// results. Called by whole quads.
struct RowResults { float lse, lse_dot[DIRECTIONS]; };

__device__ __forceinline__ RowResults finish_row(
    const Arguments& args, int direction, int head, int i, int half, Output& acc,
    OutputTangents& acc_dot, const SoftmaxState& softmax, const TangentStates& states) {
    const float scale = LINEAR ? fabsf(static_cast<float>(arrays_of(args).scale)) : 1.0f;
    float m = softmax.m[i][half], l = quad_sum(softmax.l[i][half]), rescale = 1.0f;
    if (m != -infinity()) m *= scale;
    float b[DIRECTIONS];
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v)
        b[v] = SCORES_MOVE ? quad_sum(states[v].b[i][half]) : 0.0f;
    if constexpr (SINK) {
        const WithSink<float> with_sink(m, l, sink_of<float>(args, head));
        m = with_sink.top;
        l = with_sink.sum;
        rescale = with_sink.rescale;
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            const float sink_dot = sink_tangent_of<float>(args, direction + v, head);
            b[v] = b[v] * rescale + with_sink.weight * (sink_dot - states[v].r[i][half]);
        }
    }
    const float inverse = l == 0.0f ? 1.0f : 1.0f / l, factor = rescale * inverse;
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v) b[v] *= inverse;
    #pragma unroll
    for (int j = 0; j < O_TILES; ++j)
        #pragma unroll
        for (int x = half * 2; x < half * 2 + 2; ++x) {
            acc[i][j][x] *= factor;
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v) {
                float& moved = acc_dot[v][i][j][x];
                moved *= factor;
                moved = fmaf(-b[v], acc[i][j][x], moved);
            }
        }
    RowResults results{lse_of_row(m, l)};
    #pragma unroll
    for (int v = 0; v < DIRECTIONS; ++v) results.lse_dot[v] = states[v].r[i][half] + b[v];
    return results;
}

// lse and lse' of all rows, and O and O' in acc and acc_dot.
__device__ __forceinline__ void finish_rows(
    const Arguments& args, TileCoord coord, int direction, Output& acc, OutputTangents& acc_dot,
    const SoftmaxState& softmax, const TangentStates& states) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int lane = threadIdx.x % 32;
    const i64 rows = rows_of_head(args), heads = static_cast<i64>(shape.batch) * shape.num_heads_q;
    const i64 first = (static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head) * rows;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = coord.tile * BLOCK_Q + warp_row() + i * 16 + half * 8 + lane / 4;
            const RowResults results = finish_row(
                args, direction, coord.head, i, half, acc, acc_dot, softmax, states);
            if (lane % 4 != 0 || row >= shape.seqlen_q || warp_across() != 0) continue;
            if (arrays.lse != nullptr && direction == 0)
                static_cast<float*>(arrays.lse)[first + row] = results.lse;
            if (args.lse_dot != nullptr)
                #pragma unroll
                for (int v = 0; v < DIRECTIONS; ++v)
                    static_cast<float*>(
                        args.lse_dot)[(direction + v) * heads * rows + first + row] =
                        results.lse_dot[v];
        }
}

// A result's rows, through a tile that is free: each warp its own or, if warps share rows, the
// block all of them. `to`: the head's first row.
__device__ __forceinline__ void store_rows(
    const Shape& shape, u32 tile, const Output& rows, u16* to, i64 stride, bool aligned,
    int q_start) {
    Packed<M_TILES, O_TILES> packed;
    pack_fragments<Element>(packed, rows);
    store_fragments<BLOCK_Q>(tile, packed, warp_row(), warp_column());
    constexpr bool BY_BLOCK = WARPS_ACROSS > 1;
    if constexpr (BY_BLOCK) __syncthreads();
    else __syncwarp();
    const int row = BY_BLOCK ? 0 : warp_row();
    store_tile<BY_BLOCK ? BLOCK_Q : WARP_ROWS, HEAD_DIM_V, BY_BLOCK ? THREADS : 32, BLOCK_Q>(
        tile, row, to + (q_start + row) * stride, stride, shape.seqlen_q - q_start - row,
        shape.head_dim_v, aligned, BY_BLOCK ? threadIdx.x : threadIdx.x % 32);
}

// Which results are stored; with PACKED only the call's own arguments tell.
struct Wanted { bool out, out_dot; };

// Epilogue. q and q_dot: tiles whose rows no other warp reads, those of directions Q_BYTES apart.
template <int Q_BYTES>
__device__ __forceinline__ void store(
    const Arguments& args, Wanted wanted, TileCoord coord, int direction, u32 q, u32 q_dot,
    Output& acc, OutputTangents& acc_dot, const SoftmaxState& softmax,
    const TangentStates& states) {
    finish_rows(args, coord, direction, acc, acc_dot, softmax, states);
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int q_start = coord.tile * BLOCK_Q;
    if (wanted.out && direction == 0) {
        const Strides& stride = arrays.out_stride;
        u16* out = static_cast<u16*>(arrays.out)
                 + coord.batch * stride.batch + coord.head * stride.head;
        store_rows(shape, q, acc, out, stride.token, rows_aligned(arrays.out, stride), q_start);
    }
    if (wanted.out_dot) {
        const DirectionStrides& stride = args.tangents.out_dot;
        #pragma unroll
        for (int v = 0; v < DIRECTIONS; ++v) {
            u16* out_dot = static_cast<u16*>(args.out_dot) + (direction + v) * stride.direction
                         + coord.batch * stride.batch + coord.head * stride.head;
            const bool aligned = ((reinterpret_cast<u64>(out_dot) | stride.token * 2) & 15) == 0;
            store_rows(shape, q_dot + v * Q_BYTES, acc_dot[v], out_dot, stride.token, aligned,
                       q_start);
        }
    }
}
