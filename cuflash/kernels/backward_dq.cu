// dQ from its sums: scales by the softmax scale, rounds, and puts every element in its place.
//
// Runs after backward_mma.cu, which adds to the sums in the order of its fragments
// (backward_layout.cuh).
//
// Grid: one block a tile of BLOCK_Q queries of one head,
//     blockIdx.x = (batch * num_heads_q + head) * num_q_tiles + q_tile
// Block: NUM_WARPS warps, which hold dQ as they do in backward_mma.cu.
//
// Constants: Element, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K, NUM_WARPS, SCORE_WARPS_Q and
// GRADIENT_WARPS_K as in backward_mma.cu; SHARED_BYTES.
// Shared memory: the tile of dQ, BLOCK_Q * HEAD_DIM * 2 bytes, with HEAD_DIM rounded up to a
// multiple of 64 (smem.cuh).
//
// Bound by memory: 4 bytes read and 2 written an element.
#include "backward_layout.cuh"

struct SharedPlan {
    Tile<BLOCK_Q, HEAD_DIM> dq;
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS)
backward_dq(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 dq_tile = shared_address(&reinterpret_cast<SharedPlan*>(shared_bytes)->dq);

    const Shape& shape = arguments.shape;
    const int num_q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    const int tile = blockIdx.x % num_q_tiles, pair = blockIdx.x / num_q_tiles;
    const int head = pair % shape.num_heads_q, batch = pair / shape.num_heads_q;
    const float* sums = dq_sum_tile(arguments.dq_sum, pair, num_q_tiles, tile) + dq_sum_first();
    const float scale = static_cast<float>(arguments.scale);

    QueryGrid::Fragments dq;
    #pragma unroll
    for (int m = 0; m < QueryGrid::M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < QueryGrid::N_TILES; ++n) {
            const float4 sum = *reinterpret_cast<const float4*>(sums + dq_sum_step(m, n));
            dq[m][n][0] = sum.x * scale;
            dq[m][n][1] = sum.y * scale;
            dq[m][n][2] = sum.z * scale;
            dq[m][n][3] = sum.w * scale;
        }
    Packed<QueryGrid::M_TILES, QueryGrid::N_TILES> packed;
    pack_fragments<Element>(packed, dq);
    store_fragments<BLOCK_Q>(dq_tile, packed, QueryGrid::first_row(), QueryGrid::first_column());
    __syncthreads();

    const Strides stride = arguments.dq_stride;
    const i64 first_row = static_cast<i64>(tile) * BLOCK_Q;
    u16* rows = static_cast<u16*>(arguments.dq)
              + batch * stride.batch + head * stride.head + first_row * stride.token;
    store_tile<BLOCK_Q, HEAD_DIM, THREADS, BLOCK_Q>(
        dq_tile, 0, rows, stride.token, shape.seqlen_q - tile * BLOCK_Q, shape.head_dim,
        rows_aligned(arguments.dq, stride), threadIdx.x);
}
