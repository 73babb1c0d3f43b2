// OWNED_DQ: a block has all key tiles of a head, one after another, so it alone adds to the head's
// dQ. The sums of a head's query tiles stay in a part of global memory that is the block's own,
// small enough for L2, and are used again for its next head. Nobody zeroes them, since the first
// key tile that a query tile sees stores its part, and nobody waits for other blocks. The last one,
// key tile 0, adds its part to the sum in registers, rounds, and stores dQ. The order of additions
// is always the same.
//
// The staging buffer of a part of dQ goes to and fro: DQ_EMPTY gives it to the consumer, DQ_FULL to
// the writer warp. A work tile of n iterations has n + 1 of each. The first DQ_FULL says that TMA
// has read the previous work tile's dV, the last DQ_EMPTY that dV may leave through it. For an
// iteration of key tile 0 the writer warp brings the sum before it gives the buffer.
//
// Order of memory accesses. One lane starts all bulk copies of a part, one group an iteration, and
// a query tile is not visited by two iterations in succession. So once all groups but the last are
// complete, the visits before are.
#pragma once
#include "sm90/backward_shared.cuh"

// The iterations of a work tile: query tiles [first, end), of which those from `summed` on have
// parts of the key tiles before it. Key tiles are visited the last ones first.
struct OwnedTiles {
    int first, summed, end;
    __device__ __forceinline__ OwnedTiles(const Arguments& args, int k_tile) {
        const QueryTiles tiles = query_tiles(args, k_tile, NoSequence{});
        first = tiles.first;
        end = tiles.end;
        summed = query_tiles(args, k_tile + 1, NoSequence{}).first;
    }
};

// By a writer warp: the bulk copies of one consumer's part.
__device__ __forceinline__ void keep_owned_dq(
    const Arguments& args, SharedPlan& shared, int consumer) {
    const int lane = threadIdx.x % 32;
    const u32 part = shared_address(&shared.staging[consumer]);
    const u32 loaded = shared.sum_loaded(consumer);
    const int num_q_tiles = num_query_tiles(args, BLOCK_Q);
    u32 phase = 0;
    for (WorkState state;; ++state.count) {
        const int k_tile = acquire_work_tile(shared, state).tile;
        if (k_tile < 0) break;
        __syncwarp();
        release_work_tile(shared, state, lane == 0);
        const OwnedTiles tiles(args, k_tile);
        float* sum = dq_sum_tile(args.arrays.dq_sum, blockIdx.x * num_q_tiles + tiles.first)
                   + consumer * (DQ_PART_BYTES / 4);
        barrier_sync(DQ_FULL + consumer, DQ_THREADS);
        for (int tile = tiles.first; tile < tiles.end; ++tile, sum += BLOCK_Q * HEAD_DIM) {
            const bool has_sum = tile >= tiles.summed;
            if (has_sum && lane == 0) tma_store_wait<1>();
            if (has_sum && k_tile == 0) {
                if (lane == 0) {
                    fence_async_proxy_global();
                    mbarrier_arrive_expect(loaded, DQ_PART_BYTES);
                    bulk_load(part, sum, loaded, DQ_PART_BYTES);
                }
                mbarrier_wait(loaded, phase);
                phase ^= 1;
            }
            __syncwarp();
            barrier_arrive(DQ_EMPTY + consumer, DQ_THREADS);
            barrier_sync(DQ_FULL + consumer, DQ_THREADS);
            if (lane == 0) {
                if (k_tile > 0 && has_sum) bulk_reduce_add(sum, part, DQ_PART_BYTES);
                if (k_tile > 0 && !has_sum) bulk_store(sum, part, DQ_PART_BYTES);
                tma_store_commit();
                tma_store_wait_read<0>();
            }
            __syncwarp();
        }
        barrier_arrive(DQ_EMPTY + consumer, DQ_THREADS);
    }
    tma_store_wait<0>();
}

// ---- By a consumer warpgroup; thread: of its 128 ----

// A work tile's first DQ_FULL.
__device__ __forceinline__ void give_staging(SharedPlan& shared, WorkState state, int warpgroup) {
    tma_store_wait_read<0>();
    if (DOUBLE_BUFFERED_K) shared.release_previous_k(state, threadIdx.x % 32 == 0);
    __syncwarp();
    barrier_arrive(DQ_FULL + warpgroup, DQ_THREADS);
}

// The rows and columns of dQ that a thread's part begins with.
template <bool BY_QUERIES> struct DqPart {
    int row, column;
    __device__ __forceinline__ DqPart(int warpgroup, int thread)
        : row((BY_QUERIES ? warpgroup * 64 : 0) + thread / 32 * 16 + thread % 32 / 4),
          column(BY_QUERIES ? 0 : warpgroup * 64) {}
};

// Adds the sum of the other key tiles, if there is one, in the staging buffer from `sum` on, and
// stores dQ of the query tile that begins at q_start.
template <bool BY_QUERIES, int COUNT>
__device__ __forceinline__ void finish_owned_dq(
    const Arguments& args, const WorkTile& work, float (&dq)[COUNT], u32 sum, int q_start,
    int warpgroup, int thread) {
    const BackwardArguments& arrays = args.arrays;
    if (q_start >= query_tiles(args, 1, NoSequence{}).first * BLOCK_Q)
        #pragma unroll
        for (int n = 0; n < COUNT / 4; ++n) {
            float x, y;
            load_shared_floats(sum + dq_sum_step(0, n) * 4, x, y);
            dq[n * 4] += x;
            dq[n * 4 + 1] += y;
            load_shared_floats(sum + dq_sum_step(0, n) * 4 + 8, x, y);
            dq[n * 4 + 2] += x;
            dq[n * 4 + 3] += y;
        }
    bool finite = true;
    const float scale = static_cast<float>(arrays.scale);
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        dq[i] *= scale;
        finite &= fabsf(dq[i]) < infinity();
    }
    const DqPart<BY_QUERIES> part(warpgroup, thread);
    const Strides& stride = arrays.dq_stride;
    const int row = q_start + part.row;
    Element* target = static_cast<Element*>(arrays.dq) + work.batch * stride.batch
                    + work.head * stride.head + row * stride.token + part.column;
    store_to_array(target, stride.token, dq, row, arrays.shape.seqlen_q,
                   arrays.shape.head_dim - part.column, rows_aligned(arrays.dq, stride));
    if (MASKED && !finite) *recompute_flag(args, {0, work.head, work.batch}) = 1;
}
