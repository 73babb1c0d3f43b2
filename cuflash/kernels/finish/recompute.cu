// Recomputes rows of dQ, dK and dV that a masked NaN or infinity may have reached (recompute.cuh),
// after sm90/backward.cu has stored all three itself (OWNED_DQ). A head's key tiles are flagged as
// for finish/dq.cu; its first one also if dQ has a NaN or an infinity.
//
// Grid: one block per head, blockIdx.x = batch * num_heads_kv + head; as many query heads.
// Block: NUM_THREADS threads. No shared memory. Almost all blocks find no flag.
//
// Constants: Element, CAUSAL, HEAD_DIM, HEAD_DIM_V, BLOCK_Q and BLOCK_K of that kernel, DLSE,
// DQ_SEMAPHORES = 0; Arguments and the options.
#include "sm90/semaphores.cuh"
#include "finish/recompute.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_recompute(const __grid_constant__ Arguments args) {
    constexpr int NUM_WARPS = NUM_THREADS / 32;
    const Shape& shape = arrays_of(args).shape;
    const int head = blockIdx.x % shape.num_heads_kv, batch = blockIdx.x / shape.num_heads_kv;
    const int warp = threadIdx.x / 32;
    for (int tile = 0; tile < num_key_tiles(args, BLOCK_K); ++tile) {
        if (*recompute_flag(args, {tile, head, batch}) == 0) continue;
        const int end = min((tile + 1) * BLOCK_K, shape.seqlen_k);
        for (int key = tile * BLOCK_K + warp; key < end; key += NUM_WARPS)
            recompute_key(args, batch, head, key);
        if (tile > 0) continue;
        for (int query = warp; query < shape.seqlen_q; query += NUM_WARPS)
            recompute_query(args, batch, head, query);
    }
}
