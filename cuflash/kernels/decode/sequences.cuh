// The sequences of a decode call: how many queries and keys each has, and where they begin.
//
// Without KVCACHE all sequences are as in `shape`.
#pragma once
#include "common/constants.cuh"

struct Sequence {
    int number;                                             // in the batch
    int first_query, seqlen_q;                              // first_query: 0 unless q is packed
    int first_key, seqlen_k;                                // tokens before first_key: padding
};

// A sequence's queries. It has none if its offsets are invalid.
template <class Arguments>
inline void set_queries(Sequence& sequence, const Arguments& args) {
    if constexpr (PACKED_QUERIES) {
        const int first = args.cu_seqlens_q[sequence.number * args.cache.cu_seqlens_stride];
        const int end = args.cu_seqlens_q[(sequence.number + 1) * args.cache.cu_seqlens_stride];
        const bool valid = first >= 0 && end >= first && end <= args.cache.total_q
                        && end - first <= sequence.seqlen_q;
        sequence.first_query = valid ? first : 0;
        sequence.seqlen_q = valid ? end - first : 0;
    }
}

// The tokens in a sequence's cache before the call. May be invalid.
template <class Arguments> inline i64 cached_tokens(const Arguments& args, int number) {
    if constexpr (LENGTHS) return args.cache_seqlens[number * args.cache.cache_seqlens_stride];
    else return static_cast<i64>(args.cache_seqlen);
}

// The row of the caches' first axis that holds a sequence without pages, -1 if it is invalid.
template <class Arguments> inline int slot_of(const Arguments& args, int number) {
    int slot = number;
    if constexpr (BATCH_IDX) slot = args.cache_batch_idx[number * args.cache.batch_idx_stride];
    return slot >= 0 && slot < args.cache.num_slots ? slot : -1;
}

// The tokens in a sequence's cache after the call; 0 if its length or its slot is invalid: nothing
// outside the caches is read or written.
template <class Arguments>
inline int all_tokens(const Arguments& args, const Sequence& sequence) {
    const i64 before = cached_tokens(args, sequence.number);
    const i64 end = before + (PACKED_NEW ? sequence.seqlen_q : args.cache.seqlen_new);
    const bool has_slot = PAGE_SIZE > 0 || slot_of(args, sequence.number) >= 0;
    return before >= 0 && end <= args.cache.capacity && has_slot ? static_cast<int>(end) : 0;
}

// A sequence's keys, those of this call included.
template <class Arguments>
inline void set_keys(Sequence& sequence, const Arguments& args) {
    if constexpr (KVCACHE) {
        const int end = all_tokens(args, sequence);
        int first = 0;
        if constexpr (LEFTPAD)
            first = args.cache_leftpad[sequence.number * args.cache.leftpad_stride];
        sequence.first_key = min(max(first, 0), end);
        sequence.seqlen_k = end - sequence.first_key;
    }
}

template <class Arguments> inline Sequence sequence_of(const Arguments& args, int number) {
    const Shape& shape = args.arrays.shape;
    Sequence sequence{number, 0, shape.seqlen_q, 0, shape.seqlen_k};
    set_queries(sequence, args);
    set_keys(sequence, args);
    return sequence;
}
