// Which tiles a block computes: its own or, if the kernel computes flagged tiles alone, those among
// the many tiles that few blocks share. Almost always no tile is flagged.
#pragma once
#include "common/constants.cuh"

// Calls f(tile) by whole blocks. is_flagged(tile): the same in every thread, and throughout.
template <class IsFlagged, class F>
__device__ __forceinline__ void for_each_tile(int num_tiles, IsFlagged is_flagged, F f) {
    if constexpr (ONLY_FLAGGED) {
        // A thread looks at one of the block's next NUM_THREADS tiles.
        const int step = gridDim.x;
        for (int first = blockIdx.x; first < num_tiles; first += NUM_THREADS * step) {
            const int own = first + threadIdx.x * step;
            if (!__syncthreads_or(own < num_tiles && is_flagged(own))) continue;
            const int end = min(first + NUM_THREADS * step, num_tiles);
            for (int tile = first; tile < end; tile += step) {
                if (!is_flagged(tile)) continue;
                f(tile);
                __syncthreads();                            // shared memory is free again
            }
        }
    } else {
        f(blockIdx.x);
    }
}
