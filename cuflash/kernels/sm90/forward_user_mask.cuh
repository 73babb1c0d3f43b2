// The user's mask (MASK_MOD) of a lane's two rows in forward.cu, in key tiles that it hides partly.
//
// With MASK_BITS its bits come from memory. Otherwise they are computed; S, acc and P leave few
// registers, so not all loads of arrays are in flight at once. Either happens while the tensor
// cores compute Q K^T.
#pragma once
#include "sm90/forward_work.cuh"

struct UserMaskTile {
    static constexpr int WORDS = (S_COUNT + 31) / 32;
    u32 words[WORDS];                                       // bit i % 32 of i / 32: s[i] is visible

    // warp_row: the first row of the warp's 16 in the query tile.
    __device__ __forceinline__ void load(
        const Arguments& args, const WorkTile& work, int warp_row, int tile) {
        if constexpr (MASK_BITS) {
            load_mask_bits(words, args, work.batch, work.q_start / BLOCK_Q, tile, warp_row);
        } else {
            // Set here, so that registers hold it only in such tiles.
            MaskExpression user;
            const auto& shape = tile_shape(args);
            user.set_head(args, work.batch, work.head, shape.seqlen_q, shape.seqlen_k);
            const int first_row = work.q_start + warp_row + threadIdx.x % 32 / 4;
            const int first_key = lane_key(tile * BLOCK_K);
            #pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                u32 bits = 0;
                #pragma unroll 8
                for (int j = 0; j < min(8, S_COUNT / 4 - word * 8); ++j)
                    #pragma unroll
                    for (int n = 0; n < 4; ++n) {           // two rows, two keys
                        const int row = first_row + n / 2 * 8;
                        const int key = first_key + word * 64 + j * 8 + n % 2;
                        if (user.visible(row, key)) bits |= 1u << (j * 4 + n);
                    }
                words[word] = bits;
            }
        }
    }

    __device__ __forceinline__ void apply(float (&s)[S_COUNT]) const {
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i)
            if ((words[i / 32] >> i % 32 & 1) == 0) s[i] = -infinity();
    }
};
