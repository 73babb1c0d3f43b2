// The loads of forward kernels on padded tiles (fma/forward.cu, mma8/forward.cu): tiles of K and V,
// one cp.async group each, and the tile of Q, which joins the first group.
//
// SharedPlan has the members q, k and v.
#pragma once
#include "common/padded_tiles.cuh"

template <class SharedPlan> struct KeyLoader {
    SharedPlan& shared;
    const Shape& shape;
    const Element *k, *v;                                   // of the key head
    i64 k_step, v_step;                                     // from token to token

    __device__ __forceinline__ void load_k(int tile) const {
        const int start = tile * BLOCK_K;
        load_tile(shared.k, k + start * k_step, k_step, shape.seqlen_k - start, shape.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_v(int tile) const {
        const int start = tile * BLOCK_K;
        load_tile(shared.v, v + start * v_step, v_step, shape.seqlen_k - start, shape.head_dim_v);
        cp_async_commit();
    }
};

template <class SharedPlan>
__device__ __forceinline__ void load_queries(
    SharedPlan& shared, const ForwardArguments& arrays, int batch, int head, int q_start) {
    const i64 step = arrays.q_stride.token;
    const Element* q = head_start(arrays.q, arrays.q_stride, batch, head);
    load_tile(shared.q, q + q_start * step, step, arrays.shape.seqlen_q - q_start,
              arrays.shape.head_dim);
}
