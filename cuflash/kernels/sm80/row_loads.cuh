// One head's rows of an array, loaded in tiles by cp.async.
#pragma once
#include "common/smem.cuh"

// In tiles of TILE_ROWS, as the calling thread loads them: its chunks of the first one begin at
// `first`.
template <int TILE_ROWS> struct Rows {
    using Share = LoadShare<TILE_ROWS, THREADS>;
    const u16* first;
    i64 stride;

    __device__ __forceinline__ Rows(const void* array, Strides s, int batch, int head)
        : first(thread_source<Share>(array, batch * s.batch + head * s.head, s.token)),
          stride(s.token) {}
    __device__ __forceinline__ Rows(
        const void* array, DirectionStrides s, int direction, int batch, int head)
        : first(thread_source<Share>(
              array, direction * s.direction + batch * s.batch + head * s.head, s.token)),
          stride(s.token) {}

    // The same rows `distance` elements later.
    __device__ __forceinline__ Rows after(i64 distance) const {
        Rows rows = *this;
        rows.first += distance;
        return rows;
    }

    // Starts the copy of the tile from row `start` on. RAGGED: it may reach past the last row.
    template <int COLUMNS, bool RAGGED>
    __device__ __forceinline__ void load(u32 tile, int start, int num_rows, int num_columns) const {
        load_tile<TILE_ROWS, COLUMNS, THREADS, missing<PADDED>(RAGGED)>(
            tile, first + start * stride, stride, num_rows - start, num_columns);
    }
};
