// The loads of fma/jvp.cu: a head's tiles of Q, K and V, and beside each the tiles of its tangents
// in the block's directions, if it moves. K with K' and V with V' are one cp.async group each; the
// queries join the first one.
//
// SharedPlan has the members q, q_dot, k, k_dot, v and v_dot.
#pragma once
#include "common/padded_tiles.cuh"
#include "score/tangents.cuh"

template <class SharedPlan> struct TangentLoader {
    SharedPlan& shared;
    const Arguments& args;
    int direction, batch, head, kv_head;                    // the first direction

    template <bool MOVES, int BLOCK, int COLUMNS>
    __device__ __forceinline__ void load_pair(
        SmemTile<BLOCK, COLUMNS>& tile, SmemTile<BLOCK, COLUMNS> (&tile_dot)[DIRECTIONS],
        const void* array, const Strides& stride, const void* array_dot,
        const DirectionStrides& stride_dot, int of_head, int start, int seqlen, int columns) const {
        load_tile(tile, head_start(array, stride, batch, of_head) + start * stride.token,
                  stride.token, seqlen - start, columns);
        if constexpr (MOVES)
            #pragma unroll
            for (int v = 0; v < DIRECTIONS; ++v)
                load_tile(tile_dot[v],
                          head_start(array_dot, stride_dot, direction + v, batch, of_head)
                              + start * stride_dot.token,
                          stride_dot.token, seqlen - start, columns);
    }
    __device__ __forceinline__ void load_queries(int start) const {
        const ForwardArguments& a = arrays_of(args);
        load_pair<Q_DOT>(shared.q, shared.q_dot, a.q, a.q_stride, args.q_dot, args.tangents.q_dot,
                         head, start, a.shape.seqlen_q, a.shape.head_dim);
    }
    __device__ __forceinline__ void load_k(int tile) const {
        const ForwardArguments& a = arrays_of(args);
        load_pair<K_DOT>(shared.k, shared.k_dot, a.k, a.k_stride, args.k_dot, args.tangents.k_dot,
                         kv_head, tile * BLOCK_K, a.shape.seqlen_k, a.shape.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_v(int tile) const {
        const ForwardArguments& a = arrays_of(args);
        load_pair<V_DOT>(shared.v, shared.v_dot, a.v, a.v_stride, args.v_dot, args.tangents.v_dot,
                         kv_head, tile * BLOCK_K, a.shape.seqlen_k, a.shape.head_dim_v);
        cp_async_commit();
    }
};
