// Before a backward kernel: zeroes what it adds to. Part of the kernels that compute delta.
#pragma once
#include "common/packed_sequences.cuh"

// Zeroes what the main kernel adds to; each thread of the grid has a share. dQ is contiguous:
// execute.py sees to it.
inline void clear_sums(const Arguments& args) {
    const BackwardArguments& arguments = arrays_of(args);
    const Shape& shape = arguments.shape;
    const i64 num_q_tiles = num_query_tiles(args, BLOCK_Q);
    const i64 heads = i64(shape.batch) * shape.num_heads_q, tiles = num_q_tiles * heads;
    const i64 thread = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const i64 threads = i64(gridDim.x) * NUM_THREADS;
    if constexpr (ADDS_TO_DQ) {
        Element* dq = static_cast<Element*>(arguments.dq);
        constexpr int CHUNK = 16 / sizeof(Element);
        const i64 count = heads * shape.seqlen_q * shape.head_dim;
        const i64 chunks = reinterpret_cast<u64>(dq) % 16 == 0 ? count / CHUNK : 0;
        for (i64 i = thread; i < chunks; i += threads)
            reinterpret_cast<float4*>(dq)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (i64 i = chunks * CHUNK + thread; i < count; i += threads) dq[i] = {};
    } else {
        float4* sums = static_cast<float4*>(arguments.dq_sum);
        for (i64 i = thread; i < tiles * (BLOCK_Q * DQ_COLUMNS / 4); i += threads)
            sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (arguments.dq_semaphores == nullptr) return;
    if (thread == 0) *arguments.tile_counter = 0;
    for (i64 i = thread; i < tiles; i += threads) arguments.dq_semaphores[i] = 0;
}
