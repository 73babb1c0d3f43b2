// The boolean mask (HAS_MASK) of a lane's two rows in forward.cu, key tile by key tile.
//
// The mask has one byte per pair. A lane loads 16 keys of each row at once and turns them into
// bits; the four lanes of a quad, which hold the same rows, exchange these. A load from global
// memory takes longer than Q K^T of a tile, so the bytes of the next key tile load to registers
// while this tile is computed.
#pragma once
#include "sm90/forward_work.cuh"

struct MaskTile {
    static constexpr int CHUNKS = (BLOCK_K + 63) / 64;      // of 64 keys: 16 per lane of a quad
    u32 words[2][2 * CHUNKS];           // bit n of [half][i]: whether key 32 i + n, counted from
                                        // the lane's first in S, is visible
    uint4 bytes[2][CHUNKS];             // of key tile `loaded`; unset where not is_chunk()
    int loaded = -1;
    bool has_chunks = false;

    // Before the first key tile of each query tile.
    __device__ __forceinline__ void begin_rows(const PairMask& pairs) {
        loaded = -1;
        has_chunks = pairs.has_chunks();
    }

    // Computes `words` of key tile `tile`, then starts to load the bytes of key tile `next`; -1:
    // none. If segment ids skip `next`, the following call loads the bytes of its own tile.
    __device__ __forceinline__ void load(
        const PairMask& pairs, int first_row, int seqlen_k, int tile, int next) {
        if (loaded != tile) load_bytes(pairs, first_row, seqlen_k, tile);
        const int lane = threadIdx.x % 4;
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const int key = lane_key(tile, i);
                u32 own = PairMask::keeps_of_chunk(bytes[half][i]);
                if (!is_chunk(key, seqlen_k))
                    own = pairs.keeps_of_sixteen(first_row + half * 8, key);
                // The quad's 64 bits in every lane: 16 become 32 with one exchange, then 64.
                own <<= lane % 2 * 16;
                const u32 word = own | __shfl_xor_sync(WHOLE_WARP, own, 1);
                const u32 other = __shfl_xor_sync(WHOLE_WARP, word, 2);
                words[half][i * 2] = (lane < 2 ? word : other) >> lane * 2;
                words[half][i * 2 + 1] = (lane < 2 ? other : word) >> lane * 2;
            }
        if (next >= 0) load_bytes(pairs, first_row, seqlen_k, next);
    }

    __device__ __forceinline__ void apply(float (&s)[S_COUNT]) const {
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) {
            const int key = i / 4 * 8 + i % 2;
            if ((words[i / 2 % 2][key / 32] >> key % 32 & 1) == 0) s[i] = -infinity();
        }
    }

private:
    // The first of the 16 keys whose bytes the lane loads (not the keys that it has in S).
    static __device__ __forceinline__ int lane_key(int tile, int chunk) {
        return tile * BLOCK_K + chunk * 64 + threadIdx.x % 4 * 16;
    }
    // Whether the 16 bytes from `key` on may be loaded as one chunk.
    __device__ __forceinline__ bool is_chunk(int key, int seqlen_k) const {
        return has_chunks && key + 16 <= seqlen_k;
    }
    __device__ __forceinline__ void load_bytes(
        const PairMask& pairs, int first_row, int seqlen_k, int tile) {
        loaded = tile;
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const int key = lane_key(tile, i);
                if (is_chunk(key, seqlen_k))
                    bytes[half][i] = pairs.chunk_of_mask(first_row + half * 8, key);
            }
    }
};
