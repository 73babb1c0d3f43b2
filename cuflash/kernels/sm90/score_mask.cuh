// The masks that follow from positions, on a consumer warpgroup's accumulator S = Q K^T: element i
// is in the lane's row i / 2 % 2, and its key is i / 4 * 8 + i % 2 counted from the lane's first.
// first_row: the lane's first query. k_start: the tile's first key.
#pragma once
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "sm90/consumer_constants.cuh"

__device__ __forceinline__ int lane_key(int k_start) { return k_start + threadIdx.x % 4 * 2; }

// S = -inf where the causal mask, the window or the end of the keys masks a pair.
__device__ __forceinline__ void apply_mask(
    float (&s)[S_COUNT], const Mask<CAUSAL, WINDOW>& mask, int first_row, int k_start) {
    const int first_key = lane_key(k_start);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int end = max(mask.num_keys(first_row + half * 8) - first_key, 0);
        const int count = end / 8 * 2 + min(end % 8, 2);    // of the lane's columns
        const int begin = WINDOW ? max(mask.first_key(first_row + half * 8) - first_key, 0) : 0;
        const int num_before = begin / 8 * 2 + min(begin % 8, 2);
        #pragma unroll
        for (int word = 0; word < (S_COUNT + 63) / 64; ++word) {
            const int bits = count - word * 32;
            u32 visible = bits >= 32 ? ~0u : (1u << max(bits, 0)) - 1;
            const int masked = num_before - word * 32;
            if (WINDOW) visible &= masked >= 32 ? 0u : ~0u << max(masked, 0);
            #pragma unroll
            for (int i = word * 32; i < min(word * 32 + 32, S_COUNT / 2); ++i)
                if ((visible >> i % 32 & 1) == 0)
                    s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
        }
    }
}
