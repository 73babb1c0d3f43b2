// The epilogue of sm90/backward.cu: dK and dV of a work tile leave through shared memory by TMA.
#pragma once
#include "sm90/backward_shared.cuh"

// Whether the 16 rows from `key` on reach past a packed sequence's last key, into the next
// sequence.
__device__ __forceinline__ bool crosses_end(const TileCoord&, int) { return false; }
__device__ __forceinline__ bool crosses_end(const SequenceTile& work, int key) {
    return key + 16 > work.seqlen_k;
}

// Stores the 16 rows of dK or dV of a warp that crosses_end(), without TMA.
template <int COLUMNS>
__device__ __forceinline__ void store_last_rows(
    const SequenceTile& work, int key, u32 tile, int warp_row, void* array, Strides stride,
    int num_columns) {
    u16* rows = static_cast<u16*>(array) + work.batch * stride.batch + work.head * stride.head
              + (work.first_k + key) * stride.token;
    store_tile<16, COLUMNS, 32, 64>(
        tile, warp_row, rows, stride.token, work.seqlen_k - key, num_columns, true,
        threadIdx.x % 32);
}

constexpr int DK_REGS = HEAD_DIM / 2, DV_REGS = HEAD_DIM_V / 2;   // of a thread

// Bytes in shared memory of a warpgroup's 64 rows of dK or dV.
constexpr int gradient_bytes(int columns) { return 64 * num_panels(columns) * PANEL_ROW_BYTES; }

// Scales and rounds the warp's 16 rows of dK or dV, from `key` on, and stores them to `array`
// through its warpgroup's tile of 64 rows. Returns whether the lane's elements are all finite.
template <int COUNT>
__device__ __forceinline__ bool store_gradient(
    const TensorMap& map, const WorkTile& work, int key, u32 tile, float (&gradient)[COUNT],
    float scale, void* array, const Strides& stride, int num_columns) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    bool finite = true;
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        gradient[i] *= scale;
        finite &= fabsf(gradient[i]) < infinity();
    }
    u32 packed[COUNT / 2];
    pack_pairs<Element>(packed, gradient);
    store_rows<64>(tile, warp_row, lane, packed);
    fence_async_proxy();
    __syncwarp();
    const bool by_rows = crosses_end(work, key);
    if constexpr (PACKED)
        if (by_rows)
            store_last_rows<COUNT * 2>(work, key, tile, warp_row, array, stride, num_columns);
    if (lane == 0 && !by_rows)
        tma_store_tile<64, COUNT * 2>(
            map, tile, warp_row, sequence_of(work).first_k + key, work.head, work.batch);
    __syncwarp();
    return finite;
}

// The epilogue of a work tile. dV is stored through the staging buffer, dK after it: through K's
// stage if K has two, otherwise through the rest of the staging buffer or, if both do not fit,
// through the same bytes once dV has been read.
__device__ __forceinline__ void store_gradients(
    const Arguments& args, SharedPlan& shared, WorkState state, PipelineState<STAGES> stage,
    int warpgroup, int thread, const Shape& shape, float (&dk)[DK_REGS], float (&dv)[DV_REGS]) {
    constexpr int DV_BYTES = gradient_bytes(HEAD_DIM_V), DK_BYTES = gradient_bytes(HEAD_DIM);
    constexpr bool BOTH_FIT = DV_BYTES + DK_BYTES <= DQ_PART_BYTES;
    const BackwardArguments& arrays = args.arrays;
    const int lane = threadIdx.x % 32;
    const WorkTile work = shared.work_tiles[state.stage()];
    __syncwarp();
    release_work_tile(shared, state, lane == 0);
    mbarrier_arrive_if(lane == 0, barrier_at(shared.q_empty, stage.previous()));
    if (DOUBLE_BUFFERED_K) shared.arrive_k_read(lane == 0);
    else mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
    barrier_sync(DQ_EMPTY + warpgroup, DQ_THREADS);

    const int key = work.tile * BLOCK_K + thread / 32 * 16;
    const u32 staging = shared_address(&shared.staging[warpgroup]);
    bool finite = store_gradient(args.dv_map, work, key, staging, dv, 1.0f, arrays.dv,
                                 arrays.dv_stride, shape.head_dim_v);
    if (DOUBLE_BUFFERED_K) shared.wait_k_read(state);
    else if (!BOTH_FIT) tma_store_wait_read<0>();
    __syncwarp();
    const u32 dk_tile = DOUBLE_BUFFERED_K ? shared.k_tile(state) + warpgroup * DK_BYTES
                                          : staging + (BOTH_FIT ? DV_BYTES : 0);
    finite &= store_gradient(args.dk_map, work, key, dk_tile, dk, static_cast<float>(arrays.scale),
                             arrays.dk, arrays.dk_stride, shape.head_dim);
    if (MASKED && !finite) *recompute_flag(args, flag_coord(work)) = 1;
    __syncwarp();
    if (!DOUBLE_BUFFERED_K) tma_store_wait_read<0>();
}

// The same, CARRIED_DQ: through the rows of the next stage of dS^T that are the warp's own. Rows of
// dK and dV together have as many bytes.
__device__ __forceinline__ void store_gradients_through_ds(
    const Arguments& args, SharedPlan& shared, WorkState state, PipelineState<STAGES> stage,
    PipelineState<2> ds_stage, int warpgroup, int thread, const Shape& shape,
    float (&dk)[DK_REGS], float (&dv)[DV_REGS]) {
    constexpr int BYTES = gradient_bytes(HEAD_DIM);
    static_assert(!CARRIED_DQ || (BYTES == 64 * PANEL_ROW_BYTES && BLOCK_Q == 128
                                  && gradient_bytes(HEAD_DIM_V) == BYTES),
                  "64 rows of a panel each");
    const BackwardArguments& arrays = args.arrays;
    const int lane = threadIdx.x % 32;
    const WorkTile work = shared.work_tiles[state.stage()];
    __syncwarp();
    if (!OWNED_DQ) release_work_tile(shared, state, lane == 0);
    mbarrier_arrive_if(lane == 0, barrier_at(shared.q_empty, stage.previous()));
    mbarrier_wait(barrier_at(shared.ds_empty, ds_stage.index), ds_stage.phase ^ 1);
    const int key = work.tile * BLOCK_K + thread / 32 * 16;
    const u32 rows = shared_address(&shared.ds[ds_stage.index]) + warpgroup * BYTES;
    bool finite = store_gradient(args.dv_map, work, key, rows, dv, 1.0f, arrays.dv,
                                 arrays.dv_stride, shape.head_dim_v);
    finite &= store_gradient(args.dk_map, work, key, rows + BLOCK_K * PANEL_ROW_BYTES, dk,
                             static_cast<float>(arrays.scale), arrays.dk, arrays.dk_stride,
                             shape.head_dim);
    if (MASKED && !finite) *recompute_flag(args, flag_coord(work)) = 1;
    __syncwarp();
}
