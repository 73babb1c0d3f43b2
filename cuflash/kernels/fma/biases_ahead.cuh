// float biases of a tile, read while a product is computed, so that they are in L1 when its scores
// need them: lanes have too few registers to hold them until then, and L2 takes 300 cycles, memory
// 800 (docs/lab/pair_bias.md).
#pragma once
#include "score/score_mod.cuh"

// One in each 32 bytes, shared by the block's threads. Make it before the product and call use()
// after it: the compiler drops loads that nothing uses, and waits for them at once where it can.
// ENABLED: registers suffice.
template <bool ENABLED> struct BiasesAhead {
    static constexpr bool READS = ENABLED && BIAS && sizeof(Bias) == 4;
    static constexpr int KEYS = 32 / sizeof(float), ROW = BLOCK_K / KEYS;
    static constexpr int COUNT = READS ? BLOCK_Q * ROW / (NUM_WARPS * 32) : 0;
    u32 words[COUNT > 0 ? COUNT : 1];

    __device__ __forceinline__ BiasesAhead(
        const ScoreMod<float>& score_mod, int q_start, int k_start) {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int sector = threadIdx.x + i * (NUM_WARPS * 32);
            words[i] = __float_as_uint(score_mod.bias_of(
                q_start + sector / ROW, k_start + sector % ROW * KEYS));
        }
    }
    __device__ __forceinline__ void use() const {
        u32 word = 0;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) word |= opaque(words[i]);
        if constexpr (COUNT > 0) use_word(word);
    }
};
