// The user's mask (MASK_MOD) of a lane's two rows in forward.cu, in key tiles that it hides partly.
//
// Its bits are computed while the tensor cores compute Q K^T. S, acc and P leave few registers, so
// not all loads of arrays are in flight at once.
#pragma once
#include "sm90/forward_shared.cuh"

struct UserMaskTile {
    static constexpr int COUNT = S_COUNT / 2;               // of the lane's keys
    u32 words[2][(COUNT + 31) / 32];    // bit i of [half]: key i / 2 * 8 + i % 2, counted from the
                                        // lane's first in S, is visible

    __device__ __forceinline__ void load(const MaskExpression& user, int first_row, int k_start) {
        const int first_key = lane_key(k_start);
        #pragma unroll
        for (int word = 0; word < (COUNT + 31) / 32; ++word) {
            u32 bits[2] = {0, 0};
            #pragma unroll 8
            for (int i = 0; i < min(32, COUNT - word * 32); i += 2)
                #pragma unroll
                for (int n = 0; n < 4; ++n) {               // two keys, two rows
                    const int half = n / 2, key = first_key + word * 128 + i * 4 + n % 2;
                    if (user.visible(first_row + half * 8, key)) bits[half] |= 1u << (i + n % 2);
                }
            words[0][word] = bits[0];
            words[1][word] = bits[1];
        }
    }

    __device__ __forceinline__ void apply(float (&s)[S_COUNT]) const {
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if ((words[half][i / 32] >> i % 32 & 1) == 0)
                    s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
    }
};
