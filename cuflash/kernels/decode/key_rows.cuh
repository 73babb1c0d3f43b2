// Where the keys of a sequence are stored: in the rows of one slot, or of pages.
#pragma once
#include "decode/sequences.cuh"

constexpr bool PAGED = PAGE_SIZE > 0;
constexpr int TOKENS_OF_PAGE = PAGED ? PAGE_SIZE : 1;
enum { NO_SCALES, SCALES_OF_HEADS, SCALES_OF_PAGES };

// The pages of a sequence. Token t is row t % PAGE_SIZE of page t / PAGE_SIZE of its page table.
template <class Arguments>
struct Pages {
    const Arguments& args;
    int sequence;

    // The page of a key that exists, -1 if it is invalid. Without pages 0.
    __device__ __forceinline__ int of_key(int key) const {
        if constexpr (PAGED) {
            const TokenStrides& stride = args.cache.page_table_stride;
            const int page = args.page_table[sequence * stride.batch
                                             + key / TOKENS_OF_PAGE * stride.token];
            return page >= 0 && page < args.cache.num_slots ? page : -1;
        } else {
            return 0;
        }
    }
};

// The rows of K or V of one key head.
struct KeyRows {
    const unsigned char* first;                             // row 0, of page 0 if there are pages
    i64 token_bytes, page_bytes;

    template <class Arguments>
    __device__ __forceinline__ KeyRows(const Arguments& args, const void* array,
                                       const Strides& stride, const Sequence& sequence,
                                       int kv_head)
        : token_bytes(stride.token * sizeof(Cached)), page_bytes(stride.batch * sizeof(Cached)) {
        i64 slot = 0;
        if constexpr (!KVCACHE) slot = sequence.number;
        else if constexpr (!PAGED) slot = max(slot_of(args, sequence.number), 0);
        first = static_cast<const unsigned char*>(array) + slot * page_bytes
              + kv_head * stride.head * i64(sizeof(Cached))
              + sequence.first_key * token_bytes;
    }

    __device__ __forceinline__ const unsigned char* row(int page, int key) const {
        if constexpr (PAGED) return first + page * page_bytes + key % TOKENS_OF_PAGE * token_bytes;
        else return first + key * token_bytes;
    }
};

// The number that the stored keys or values of a page's key head are relative to. `scales` is
// k_scale or v_scale.
__device__ __forceinline__ float scale_of(
    const float* scales, const HeadStrides& stride, int page, int kv_head) {
    return scales[(SCALES == SCALES_OF_PAGES ? page * stride.batch : 0) + kv_head * stride.head];
}

// Those of K and V of a key head, 1 if its pages have their own.
template <class Arguments>
__device__ __forceinline__ float k_scale_of_head(const Arguments& args, int kv_head) {
    if constexpr (SCALES != SCALES_OF_HEADS) return 1.0f;
    else return scale_of(args.k_scale, args.cache.k_scale_stride, 0, kv_head);
}
template <class Arguments>
__device__ __forceinline__ float v_scale_of_head(const Arguments& args, int kv_head) {
    if constexpr (SCALES != SCALES_OF_HEADS) return 1.0f;
    else return scale_of(args.v_scale, args.cache.v_scale_stride, 0, kv_head);
}
