// Pipelines of tiles of smem.cuh between a producer thread, which copies them by TMA, and consumer
// warpgroups.
#pragma once
#include "common/smem.cuh"

// Which of STAGES stages is next, and the phase (its parity) that ends when the stage is full.
template <int STAGES> struct PipelineState {
    int index = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) { index = 0; phase ^= 1; }
    }
    __device__ __forceinline__ int previous() const {
        return index == 0 ? STAGES - 1 : index - 1;
    }
};

// The address of barrier i.
template <int N> __device__ __forceinline__ u32 barrier_at(const u64 (&barriers)[N], int i) {
    return shared_address(&barriers) + static_cast<int>(sizeof(u64)) * i;
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 phase) {
    while (!mbarrier_try_wait(barrier, phase)) {}
}

// Waits until a stage is full.
template <int STAGES>
__device__ __forceinline__ void pipeline_wait(u32 full, const PipelineState<STAGES>& stage) {
    mbarrier_wait(full + 8 * stage.index, stage.phase);
}

// Starts the copy of one tile, a panel of 64 columns at a time. `more`: bytes of other copies that
// arrive at the same barrier. first_column: the array's column that is the tile's first.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void tma_load_tile(
    u32 tile, const TensorMap& map, u32 full, int token, int head, int batch, int more = 0,
    int first_column = 0) {
    mbarrier_arrive_expect(full, ROWS * num_panels(COLUMNS) * PANEL_ROW_BYTES + more);
    #pragma unroll
    for (int panel = 0; panel < num_panels(COLUMNS); ++panel)
        tma_load(tile + panel * ROWS * PANEL_ROW_BYTES, map, full,
                 first_column + panel * PANEL_COLUMNS, token, head, batch);
}

// Starts the store of rows of a tile of ROWS rows, from first_row on, as one bulk group: as many as
// the map's boxes have.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void tma_store_tile(
    const TensorMap& map, u32 tile, int first_row, int token, int head, int batch) {
    #pragma unroll
    for (int panel = 0; panel < num_panels(COLUMNS); ++panel)
        tma_store(map, tile + (panel * ROWS + first_row) * PANEL_ROW_BYTES,
                  panel * PANEL_COLUMNS, token, head, batch);
    tma_store_commit();
}
