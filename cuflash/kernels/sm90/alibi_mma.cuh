// Slopes (ALiBi) by the tensor cores: where a tile's keys are all on one side of the queries, what
// it adds to their products S = Q K^T is one product more.
//
//     S += A B,   each row of A:  x in columns 0 to 2, or in 8 to 10 (as three elements), else 0
//                 B:  key - (BLOCK_K - 1) in rows 0 to 2,  -key in rows 8 to 10,  else 0
//
// x = slope / scale. Keys before the queries count from the tile's last one, those after from its
// first: what is added to the nearest key is 0, and small where weights are not. The rest of a
// score, -slope times the distance to that key, is a row's.
//
// Three elements hold 24 bits of x, whose products with whole numbers below 256 are exact, as are
// those. Of float16 they leave 2^-25 at most, of scores that are scale times as large.
//
// Constants: Element, BLOCK_K.
#pragma once
#include "common/elements.cuh"
#include "sm90/wgmma.cuh"

// Where a key tile stands: before all queries of a warpgroup, after, or neither.
enum class Side { ACROSS, BEFORE, AFTER };

// Without slopes these are nothing.
template <bool> struct SlopeTile {
    template <int THREADS> __device__ __forceinline__ void fill_slopes() {}
    __device__ __forceinline__ u64 slope_keys() const { return 0; }
};

// B, filled once by a whole block of THREADS.
template <> struct SlopeTile<true> {
    static_assert(BLOCK_K <= 256, "bfloat16 has eight bits");
    SmemTile<WGMMA_K, BLOCK_K> keys;
    template <int THREADS> __device__ __forceinline__ void fill_slopes() {
        for (int i = threadIdx.x; i < WGMMA_K * BLOCK_K / 2; i += THREADS) {
            const int row = i % WGMMA_K, key = i / WGMMA_K * 2;
            const float first = static_cast<float>(row < 8 ? key - (BLOCK_K - 1) : -key);
            const float second = row < 8 ? first + 1.0f : first - 1.0f;
            store_shared(shared_address(&keys) + tile_offset<WGMMA_K>(row, key),
                         row % 8 < 3 ? pack<Element>(first, second) : 0u);
        }
        fence_async_proxy();
    }
    __device__ __forceinline__ u64 slope_keys() const {
        return descriptor(shared_address(&keys), WGMMA_K * PANEL_ROW_BYTES);
    }
};

template <bool> struct SlopeRows {
    static constexpr Side side = Side::ACROSS;
    __device__ __forceinline__ void set_head(float, float, int) {}
    template <int COUNT> __device__ __forceinline__ void multiply_add(float (&)[COUNT], int, u64) {}
    __device__ __forceinline__ int nearest_key(int k_start) const { return k_start; }
};

// A, of one head and a warpgroup's queries: the lane's words of it, as fragments have them.
template <> struct SlopeRows<true> {
    u32 word = 0, words[4];                                 // in columns where x is; of a product
    bool served = false;                                    // else all slopes are added to scores
    int first_query = 0;                                    // counted as keys are
    Side side = Side::ACROSS;                               // where the last product's keys stand

    // From 2^15 on x may have no three float16 elements; nobody's slopes come near that.
    __device__ __forceinline__ void set_head(float slope, float scale, int query) {
        const float x = slope / scale;
        served = scale > 0.0f && fabsf(x) < 0x1p15f;
        const float after_one = x - of_pair<Element>(pack<Element>(x, 0.0f), 0);
        const u32 two = pack<Element>(x, after_one);
        const float after_two = after_one - of_pair<Element>(two, 1);
        const int column = threadIdx.x % 4 * 2;
        word = column == 0 ? two : column == 2 ? pack<Element>(after_two, 0.0f) : 0u;
        first_query = query;
    }

    // s += A B, asynchronously: nothing if keys are ACROSS. `words` may not be touched meanwhile.
    template <int COUNT>
    __device__ __forceinline__ void multiply_add(float (&s)[COUNT], int k_start, u64 keys) {
        side = !served ? Side::ACROSS
             : k_start + BLOCK_K - 1 <= first_query ? Side::BEFORE
             : k_start >= first_query + WGMMA_M - 1 ? Side::AFTER : Side::ACROSS;
        words[0] = words[1] = side == Side::BEFORE ? word : 0u;
        words[2] = words[3] = side == Side::AFTER ? word : 0u;
        gemm_ab_rs<Element, WGMMA_K>(s, words, keys, true);
    }

    // From which that product counts.
    __device__ __forceinline__ int nearest_key(int k_start) const {
        return k_start + (side == Side::BEFORE ? BLOCK_K - 1 : 0);
    }
};
