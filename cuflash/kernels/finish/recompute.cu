// Recomputes rows of dQ, dK and dV that a masked NaN or infinity may have reached (recompute.cuh),
// after sm90/backward.cu has stored all three itself (OWNED_DQ). A head's key tiles are flagged as
// for finish/dq.cu; its first one also if dQ has a NaN or an infinity.
//
// Grid: any number of blocks, each with a range of heads, numbered batch * num_heads_kv + head.
// There are as many query heads.
// Block: NUM_THREADS threads. No shared memory. Almost all blocks find no flag.
//
// Constants: Element, CAUSAL, HEAD_DIM, HEAD_DIM_V, BLOCK_Q and BLOCK_K of that kernel, DLSE,
// DQ_SEMAPHORES = 0; Arguments and the options.
#include "sm90/semaphores.cuh"
#include "finish/recompute.cuh"

// Rows of a flagged key tile; of its first one, those of dQ too. By all warps.
__device__ __forceinline__ void recompute_tile(
    const Arguments& args, int tile, int head, int batch) {
    constexpr int NUM_WARPS = NUM_THREADS / 32;
    const Shape& shape = arrays_of(args).shape;
    const int warp = threadIdx.x / 32, end = min((tile + 1) * BLOCK_K, shape.seqlen_k);
    for (int key = tile * BLOCK_K + warp; key < end; key += NUM_WARPS)
        recompute_key(args, batch, head, key);
    for (int query = warp; tile == 0 && query < shape.seqlen_q; query += NUM_WARPS)
        recompute_query(args, batch, head, query);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_recompute(const __grid_constant__ Arguments args) {
    const Shape& shape = arrays_of(args).shape;
    const int* flags = arrays_of(args).recompute_flags;
    const int tiles = num_key_tiles(args, BLOCK_K), heads = shape.num_heads_kv;
    const int of_block = (heads * shape.batch + gridDim.x - 1) / gridDim.x * tiles;
    const int first = blockIdx.x * of_block;
    const int end = min(first + of_block, heads * shape.batch * tiles);
    bool found = false;
    for (int i = first + threadIdx.x; i < end; i += NUM_THREADS) found |= flags[i] != 0;
    if (!__syncthreads_or(found)) return;
    for (int i = first; i < end; ++i)
        if (flags[i] != 0)
            recompute_tile(args, i % tiles, i / tiles % heads, i / (tiles * heads));
}
