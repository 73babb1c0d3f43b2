// The loads of backward kernels on padded tiles (fma/backward.cu, mma8/backward.cu): a key tile
// once, then dO with lse and delta, and Q, of one query tile after another.
//
// SharedPlan has the members k, v, q, dout, lse and delta.
#pragma once
#include "common/packed_sequences.cuh"
#include "common/padded_tiles.cuh"
#include "common/scheduler.cuh"

template <class SharedPlan>
__device__ __forceinline__ void load_keys(
    SharedPlan& shared, const BackwardArguments& arrays, TileCoord coord, int k_start,
    int num_keys) {
    const i64 k_step = arrays.k_stride.token, v_step = arrays.v_stride.token;
    load_tile(shared.k,
              head_start(arrays.k, arrays.k_stride, coord.batch, coord.head) + k_start * k_step,
              k_step, num_keys, arrays.shape.head_dim);
    load_tile(shared.v,
              head_start(arrays.v, arrays.v_stride, coord.batch, coord.head) + k_start * v_step,
              v_step, num_keys, arrays.shape.head_dim_v);
}

// Each load is one cp.async group, which is empty after the last head. WHOLE_APART: by
// load_tile_or_whole().
template <class SharedPlan, bool WHOLE_APART = false> struct QueryLoader {
    SharedPlan& shared;
    const Arguments& args;
    const BackwardArguments& arrays;
    const Shape& shape;
    const TileCoord& coord;
    const int& end_head;

    __device__ __forceinline__ void load_dout(int head, int tile) const {
        if (head < end_head) {
            const int start = tile * BLOCK_Q, num_rows = shape.seqlen_q - start;
            const i64 stride = arrays.dout_stride.token;
            const i64 row =
                (static_cast<i64>(coord.batch) * shape.num_heads_q + head) * rows_of_head(args)
                + start;
            load(shared.dout,
                 head_start(arrays.dout, arrays.dout_stride, coord.batch, head) + start * stride,
                 stride, num_rows, shape.head_dim_v);
            constexpr int WORDS = sizeof(Element) / 4;      // cp.async copies 4 bytes
            const u32* lse = reinterpret_cast<const u32*>(shared.lse);
            const u32* delta = reinterpret_cast<const u32*>(shared.delta);
            const auto load_word = [&](int i) {
                const int bytes = i / WORDS < num_rows ? 4 : 0;
                cp_async_4(shared_address(lse + i),
                           static_cast<const u32*>(arrays.lse) + row * WORDS + i, bytes);
                cp_async_4(shared_address(delta + i),
                           static_cast<const u32*>(arrays.delta) + row * WORDS + i, bytes);
            };
            if constexpr (WHOLE_APART) {
                #pragma unroll
                for (int first = 0; first < BLOCK_Q * WORDS; first += THREADS)
                    if (first + threadIdx.x < BLOCK_Q * WORDS) load_word(first + threadIdx.x);
            } else {
                for (int i = threadIdx.x; i < BLOCK_Q * WORDS; i += THREADS) load_word(i);
            }
        }
        cp_async_commit();
    }

    __device__ __forceinline__ void load_q(int head, int tile) const {
        if (head < end_head) {
            const int start = tile * BLOCK_Q;
            const i64 stride = arrays.q_stride.token;
            load(shared.q,
                 head_start(arrays.q, arrays.q_stride, coord.batch, head) + start * stride,
                 stride, shape.seqlen_q - start, shape.head_dim);
        }
        cp_async_commit();
    }

private:
    template <class Tile>
    __device__ __forceinline__ void load(
        Tile& tile, const Element* source, i64 stride, int num_rows, int num_columns) const {
        if constexpr (WHOLE_APART) load_tile_or_whole(tile, source, stride, num_rows, num_columns);
        else load_tile(tile, source, stride, num_rows, num_columns);
    }
};
