// ALiBi on the tensor cores: if all keys of a tile are on one side of the warpgroup's queries, one
// more MMA adds the ALiBi term to S = Q K^T, up to a constant of each row.
//
//     S += A B,   each row of A:  x in columns 0 to 2, or in 8 to 10 (as three elements), else 0
//                 B:  key - (BLOCK_K - 1) in rows 0 to 2,  -key in rows 8 to 10,  else 0
//
// x = slope / scale. Distances are counted from the tile's key that is nearest to the queries (its
// last key if keys come before the queries, else its first), so terms are small where weights are
// large. The rest of the term, -slope times the distance to that key, is the same for a whole row.
//
// x is split into three elements, 24 bits. The integers below 256, and their products with the
// elements, are exact. In float16, the third element may be subnormal: x has an absolute error of
// at most 2^-25.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "sm90/wgmma.cuh"

// Whether a key tile is before all queries of a warpgroup, after all of them, or neither.
enum class Side { ACROSS, BEFORE, AFTER };

// B, filled once by a whole block of THREADS. Empty without ALIBI_MMA.
template <bool> struct AlibiKeys {
    template <int THREADS> __device__ __forceinline__ void fill_alibi() {}
    __device__ __forceinline__ u64 alibi_desc() const { return 0; }
};
template <> struct AlibiKeys<true> {
    static_assert(BLOCK_K <= 256, "bfloat16 has eight bits");
    SmemTile<WGMMA_K, BLOCK_K> keys;
    template <int THREADS> __device__ __forceinline__ void fill_alibi() {
        for (int i = threadIdx.x; i < WGMMA_K * BLOCK_K / 2; i += THREADS) {
            const int row = i % WGMMA_K, key = i / WGMMA_K * 2;
            const float first = static_cast<float>(row < 8 ? key - (BLOCK_K - 1) : -key);
            const float second = row < 8 ? first + 1.0f : first - 1.0f;
            store_shared(shared_address(&keys) + tile_offset<WGMMA_K>(row, key),
                         row % 8 < 3 ? pack<Element>(first, second) : 0u);
        }
        fence_async_proxy();
    }
    __device__ __forceinline__ u64 alibi_desc() const {
        return descriptor(shared_address(&keys), WGMMA_K * PANEL_ROW_BYTES);
    }
};

template <bool> struct AlibiQueries {
    static constexpr Side side = Side::ACROSS;
    __device__ __forceinline__ void set_head(float, float, int) {}
    template <int COUNT> __device__ __forceinline__ void gemm(float (&)[COUNT], int, u64) {}
    __device__ __forceinline__ int nearest_key(int k_start) const { return k_start; }
};

// A for one head and a warpgroup's queries, in the layout of A fragments.
template <> struct AlibiQueries<true> {
    u32 word = 0;                                           // the lane's elements of x
    u32 words[4];                                           // the operand of the last MMA
    bool enabled = false;                                   // else CUDA cores add the ALiBi term
    int first_query = 0;                                    // the key aligned with the first query
    Side side = Side::ACROSS;                               // of the last MMA's keys

    // |x| >= 2^15 may not fit three float16 elements; slopes in use are far smaller.
    __device__ __forceinline__ void set_head(float slope, float scale, int query) {
        const float x = slope / scale;
        enabled = scale > 0.0f && fabsf(x) < 0x1p15f;
        const float residual_1 = x - of_pair<Element>(pack<Element>(x, 0.0f), 0);
        const u32 first_two = pack<Element>(x, residual_1);
        const float residual_2 = residual_1 - of_pair<Element>(first_two, 1);
        const int column = threadIdx.x % 4 * 2;
        word = column == 0 ? first_two : column == 2 ? pack<Element>(residual_2, 0.0f) : 0u;
        first_query = query;
    }

    // s += A B, asynchronously; adds 0 if keys are ACROSS. `words` must not change until the wait.
    template <int COUNT>
    __device__ __forceinline__ void gemm(float (&s)[COUNT], int k_start, u64 keys) {
        side = !enabled ? Side::ACROSS
             : k_start + BLOCK_K - 1 <= first_query ? Side::BEFORE
             : k_start >= first_query + WGMMA_M - 1 ? Side::AFTER : Side::ACROSS;
        words[0] = words[1] = side == Side::BEFORE ? word : 0u;
        words[2] = words[3] = side == Side::AFTER ? word : 0u;
        gemm_ab_rs<Element, WGMMA_K>(s, words, keys, true);
    }

    // The key from which the last MMA counts distances.
    __device__ __forceinline__ int nearest_key(int k_start) const {
        return k_start + (side == Side::BEFORE ? BLOCK_K - 1 : 0);
    }
};
