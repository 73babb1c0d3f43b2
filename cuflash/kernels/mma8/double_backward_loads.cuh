// Loads of mma8's double backward kernels: of one key tile, and of one query tile after another.
#pragma once
#include "common/packed_sequences.cuh"
#include "common/padded_tiles.cuh"
#include "common/scheduler.cuh"
#include "score/tangents.cuh"

// The targets are members of `to`. All of Threads load; each load of a query tile is one cp.async
// group, which is empty after the last head. What does not move has no cotangent.
template <class Threads = AllThreads> struct Loader {
    const Arguments& args;
    const BackwardArguments& arrays;
    TileCoord coord;
    int end_head;

    // All tiles of keys.
    template <class Shared>
    __device__ __forceinline__ void load_all_keys(Shared& shared, int start) const {
        load_k(shared.k, start);
        load_v(shared.v, start);
        load_k_dot(shared.k_dot, start);
        load_v_dot(shared.v_dot, start);
    }
    template <class Tile> __device__ __forceinline__ void load_k(Tile& k, int start) const {
        load_keys(k, head_start(arrays.k, arrays.k_stride, coord.batch, coord.head),
                  arrays.k_stride.token, start, arrays.shape.head_dim);
    }
    template <class Tile> __device__ __forceinline__ void load_v(Tile& v, int start) const {
        load_keys(v, head_start(arrays.v, arrays.v_stride, coord.batch, coord.head),
                  arrays.v_stride.token, start, arrays.shape.head_dim_v);
    }
    template <class Tile>
    __device__ __forceinline__ void load_k_dot(Tile& k_dot, int start) const {
        if constexpr (K_DOT) load_keys(
            k_dot, head_start(args.k_dot, args.tangents.k_dot, 0, coord.batch, coord.head),
            args.tangents.k_dot.token, start, arrays.shape.head_dim);
    }
    template <class Tile>
    __device__ __forceinline__ void load_v_dot(Tile& v_dot, int start) const {
        if constexpr (V_DOT) load_keys(
            v_dot, head_start(args.v_dot, args.tangents.v_dot, 0, coord.batch, coord.head),
            args.tangents.v_dot.token, start, arrays.shape.head_dim_v);
    }
    template <class Tile>
    __device__ __forceinline__ void load_keys(
        Tile& tile, const Element* rows, i64 step, int start, int num_columns) const {
        load_tile<Threads>(
            tile, rows + start * step, step, arrays.shape.seqlen_k - start, num_columns);
    }

    // dO, and the rows' numbers.
    template <class Target>
    __device__ __forceinline__ void load_dout(Target& to, int head, int tile) const {
        if (head < end_head) {
            const Shape& shape = arrays.shape;
            const int start = tile * BLOCK_Q, num_rows = shape.seqlen_q - start;
            const i64 step = arrays.dout_stride.token;
            load_tile<Threads>(
                to.dout,
                head_start(arrays.dout, arrays.dout_stride, coord.batch, head) + start * step,
                step, num_rows, shape.head_dim_v);
            const i64 row =
                (static_cast<i64>(coord.batch) * shape.num_heads_q + head) * rows_of_head(args)
                + start;
            load_numbers(to.lse, arrays.lse, row, num_rows);
            load_numbers(to.delta, arrays.delta, row, num_rows);
            load_numbers(to.b, args.lse_dot, row, num_rows);
            load_numbers(to.delta_dot, args.delta_dot, row, num_rows);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void load_numbers(
        Element (&numbers)[BLOCK_Q], const void* rows, i64 row, int num_rows) const {
        constexpr int WORDS = sizeof(Element) / 4;          // cp.async copies 4 bytes
        const u32* target = reinterpret_cast<const u32*>(numbers);
        for (int i = Threads::rank(); i < BLOCK_Q * WORDS; i += Threads::COUNT)
            cp_async_4(shared_address(target + i),
                       static_cast<const u32*>(rows) + row * WORDS + i,
                       i / WORDS < num_rows ? 4 : 0);
    }

    // Q and ddQ.
    template <class Target>
    __device__ __forceinline__ void load_q(Target& to, int head, int tile) const {
        if (head < end_head) {
            const int start = tile * BLOCK_Q, num_rows = arrays.shape.seqlen_q - start;
            const i64 step = arrays.q_stride.token, dot_step = args.tangents.q_dot.token;
            load_tile<Threads>(
                to.q, head_start(arrays.q, arrays.q_stride, coord.batch, head) + start * step,
                step, num_rows, arrays.shape.head_dim);
            if constexpr (Q_DOT) load_tile<Threads>(
                to.q_dot,
                head_start(args.q_dot, args.tangents.q_dot, 0, coord.batch, head)
                    + start * dot_step,
                dot_step, num_rows, arrays.shape.head_dim);
        }
        cp_async_commit();
    }
};
