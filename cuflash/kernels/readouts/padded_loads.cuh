// Loads of padded tiles (padded_tiles.cuh) for the kernels of readouts/, by cp.async.
#pragma once
#include "common/padded_tiles.cuh"

struct PaddedLoads {
    // Starts the copy of the rows of one head from `start` on; of those that token_of(row) names,
    // none if it is negative.
    template <int COUNT, int COLUMNS>
    static __device__ __forceinline__ void load(
        SmemTile<COUNT, COLUMNS>& tile, const void* array, const Strides& stride, int batch,
        int head, int start, int seqlen, int num_columns) {
        load_tile(tile, head_start(array, stride, batch, head) + start * stride.token,
                  stride.token, seqlen - start, num_columns);
    }
    template <int COUNT, int COLUMNS, class TokenOf>
    static __device__ __forceinline__ void gather(
        SmemTile<COUNT, COLUMNS>& tile, const void* array, const Strides& stride, int batch,
        int head, int num_columns, TokenOf token_of) {
        constexpr int CHUNKS = COLUMNS / CHUNK, BYTES = sizeof(Element);
        const Element* first = head_start(array, stride, batch, head);
        #pragma unroll 4
        for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, column = i % CHUNKS * CHUNK, token = token_of(row);
            const int valid = min(max(num_columns - column, 0), CHUNK) * BYTES;
            cp_async_16_partly(shared_address(&tile.at[row][column]),
                               first + max(token, 0) * stride.token + column,
                               token < 0 ? 0 : valid);
        }
    }
    template <int COUNT, int COLUMNS>
    static __device__ __forceinline__ Element element(
        const SmemTile<COUNT, COLUMNS>& tile, int row, int column) {
        return tile.at[row][column];
    }
    // Of what this thread has loaded.
    template <int COUNT, int COLUMNS>
    static __device__ __forceinline__ bool nonfinite(const SmemTile<COUNT, COLUMNS>& tile) {
        return loaded_nonfinite(tile);
    }
    static __device__ __forceinline__ void commit() { cp_async_commit(); }
    static __device__ __forceinline__ void wait() { cp_async_wait<0>(); }
};
