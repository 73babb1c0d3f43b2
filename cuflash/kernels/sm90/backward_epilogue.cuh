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

// Bytes in shared memory of a warpgroup's 64 rows of dK or dV.
constexpr int gradient_bytes(int columns) { return 64 * num_panels(columns) * PANEL_ROW_BYTES; }

// Scales and rounds the warp's 16 rows of dK or dV, from `key` on, and stores them to `array`
// through its warpgroup's tile of 64 rows; to that tile alone if not `is_stored`. Returns whether
// the lane's elements are all finite.
template <int COUNT>
__device__ __forceinline__ bool store_gradient(
    const TensorMap& map, const WorkTile& work, int key, u32 tile, float (&gradient)[COUNT],
    float scale, void* array, const Strides& stride, int num_columns, bool is_stored) {
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
    if (lane == 0 && !by_rows && is_stored)
        tma_store_tile<64, COUNT * 2>(
            map, tile, warp_row, sequence_of(work).first_k + key, work.head, work.batch);
    __syncwarp();
    return finite;
}
