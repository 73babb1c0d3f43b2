// Pairs that a call hides besides those past the bounds of mask.cuh: by segment ids (SEGMENTS), of
// which only equal ones see each other, and by a boolean mask (HAS_MASK).
//
// What prepare/segment_ranges.cu found of each tile, the smallest and the largest of its ids,
// answers for a whole tile of pairs. Of a mask nothing is known before: it may hide part of any
// tile.
//
// Constants: Arguments, SEGMENTS, HAS_MASK, BLOCK_Q, BLOCK_K.
#pragma once
#include "common/mask.cuh"

constexpr bool PAIRWISE = SEGMENTS || HAS_MASK;             // whether pairs are asked one by one

enum class Visibility { NONE, PARTLY, ALL };

// The smallest and the largest segment id of a tile, which has tokens.
struct Range { int low, high; };

inline bool are_apart(Range a, Range b) { return a.high < b.low || b.high < a.low; }

// One head's. What it reads is found anew each time: that takes no registers in between.
template <class Arguments> struct PairsOf {
    const Arguments& args;
    int batch, head = 0;

    PairsOf(const Arguments& args, int batch) : args(args), batch(batch) {}
    void set_head(int new_head) {
        if constexpr (HAS_MASK) head = new_head;
    }

    int id_of_query(int query) const {
        const TokenStrides& stride = args.options.ids_q_stride;
        return static_cast<const int*>(args.segment_ids_q)[
            batch * stride.batch + query * stride.token];
    }
    int id_of_key(int key) const {
        const TokenStrides& stride = args.options.ids_k_stride;
        return static_cast<const int*>(args.segment_ids_k)[
            batch * stride.batch + key * stride.token];
    }
    const unsigned char* byte_of(int query, int key) const {
        const PairStrides& stride = args.options.mask_stride;
        return static_cast<const unsigned char*>(args.mask)
             + batch * stride.batch + head * stride.head
             + query * stride.query + key * stride.key;
    }
    bool keeps(int query, int key) const { return *byte_of(query, key) != 0; }

    // Of a query and keys key .. key + 3: bit n is of the n-th pair, 1 if the mask keeps it; of one
    // that the array lacks, that of another. IN_WORDS: with has_words().
    template <bool IN_WORDS> u32 keeps_of_four(int query, int key) const {
        u32 bits = 0;
        if constexpr (HAS_MASK) {
            const Shape& shape = arrays_of(args).shape;
            const int own_query = min(query, shape.seqlen_q - 1);
            if constexpr (IN_WORDS) {
                // A byte's upper bit becomes whether it is not 0; the product brings those of all
                // four next to one another, and nothing that is carried to them.
                const u32 word = *reinterpret_cast<const u32*>(byte_of(own_query, key));
                const u32 flags = ((word & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | word) >> 7 & 0x01010101u;
                bits = flags * 0x01020408u >> 24 & 0xF;
            } else {
                #pragma unroll
                for (int n = 0; n < 4; ++n)
                    bits |= (keeps(own_query, min(key + n, shape.seqlen_k - 1)) ? 1u : 0u) << n;
            }
        }
        return bits;
    }
    // Whether bytes of four keys, from a multiple of 4 on and up to `end`, are a word of memory.
    bool has_words(int end) const {
        if constexpr (HAS_MASK) {
            const PairStrides& stride = args.options.mask_stride;
            return stride.key == 1 && stride.query % 4 == 0 && end <= arrays_of(args).shape.seqlen_k
                && reinterpret_cast<u64>(byte_of(0, 0)) % 4 == 0;
        } else {
            return false;
        }
    }

    // Of a pair that the arrays have.
    bool visible(int query, int key) const {
        if constexpr (SEGMENTS)
            if (id_of_query(query) != id_of_key(key)) return false;
        if constexpr (HAS_MASK)
            if (!keeps(query, key)) return false;
        return true;
    }

    // Of a tile: its segment ids. First come all query tiles, batch by batch.
    Range of_queries(int tile) const {
        const Shape& shape = arrays_of(args).shape;
        const int tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
        return static_cast<const Range*>(args.found)[i64(batch) * tiles + tile];
    }
    Range* ranges_of_keys() const {
        const Shape& shape = arrays_of(args).shape;
        const int q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
        const int tiles = (shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
        return static_cast<Range*>(args.found)
             + (i64(shape.batch) * q_tiles + i64(batch) * tiles);
    }
    Range of_keys(int tile) const { return ranges_of_keys()[tile]; }

    // Of a tile, by its numbers. NONE is an answer for all heads.
    Visibility of_tile(int q_tile, int k_tile) const {
        if constexpr (SEGMENTS) {
            const Range q = of_queries(q_tile), k = of_keys(k_tile);
            if (are_apart(q, k)) return Visibility::NONE;
            if (q.low != q.high || k.low != k.high) return Visibility::PARTLY;
        }
        return HAS_MASK ? Visibility::PARTLY : Visibility::ALL;
    }
    bool skips(int q_tile, int k_tile) const {
        return SEGMENTS && of_tile(q_tile, k_tile) == Visibility::NONE;
    }
    bool sees_all(int q_tile, int k_tile) const {
        return !PAIRWISE || of_tile(q_tile, k_tile) == Visibility::ALL;
    }

    // The next tile below k_tile, not below `first`, that is not skipped; less than `first` if none
    // is. By a whole warp, 32 tiles at a time.
    int key_tile_before(int q_tile, int k_tile, int first) const {
        if constexpr (SEGMENTS) {
            for (int from = k_tile - 1; from >= first; from -= 32) {
                const int tile = from - threadIdx.x % 32;
                const u32 met = __ballot_sync(0xFFFFFFFFu, tile >= first && !skips(q_tile, tile));
                if (met != 0) return from - (__ffs(met) - 1);
            }
            return first - 1;
        } else {
            return k_tile - 1;
        }
    }

    // The next tile after q_tile, before `end`, that is not skipped; `end` if none is.
    int query_tile_after(int q_tile, int k_tile, int end) const {
        if constexpr (SEGMENTS) {
            for (int from = q_tile + 1; from < end; from += 32) {
                const int tile = from + threadIdx.x % 32;
                const u32 met = __ballot_sync(0xFFFFFFFFu, tile < end && !skips(tile, k_tile));
                if (met != 0) return from + (__ffs(met) - 1);
            }
            return end;
        } else {
            return q_tile + 1;
        }
    }

    // How many of the tiles [first, end) are met.
    template <class IsMet> static int count_tiles(int first, int end, IsMet is_met) {
        int count = 0;
        for (int from = first; from < end; from += 32) {
            const int tile = from + threadIdx.x % 32;
            count += __popc(__ballot_sync(0xFFFFFFFFu, tile < end && is_met(tile)));
        }
        return count;
    }

    // How many of the query tiles [first, end) are not skipped.
    int query_tiles_between(int first, int end, int k_tile) const {
        if constexpr (SEGMENTS)
            return count_tiles(first, end, [&](int tile) { return !skips(tile, k_tile); });
        else
            return end - first;
    }

    // How many of the tiles [first, k_tile) are not skipped.
    int key_tiles_before(int q_tile, int k_tile, int first) const {
        if constexpr (SEGMENTS)
            return count_tiles(first, k_tile, [&](int tile) { return !skips(q_tile, tile); });
        else
            return k_tile - first;
    }
};

using Pairs = PairsOf<Arguments>;

// Behind the last batch's ranges stands how many tiles were taken by blocks that take one after
// another.
template <class Arguments> inline int* counter_behind_ranges(const Arguments& args) {
    const PairsOf<Arguments> of_batch_behind(args, arrays_of(args).shape.batch);
    return reinterpret_cast<int*>(of_batch_behind.ranges_of_keys());
}

// Behind the counter stands, forward, an int for each item (tile_before, packed_sequences.cuh);
// then the order in which blocks take the tiles of all batches (prepare/segment_order.cu).
inline int items_behind_counter(const ForwardWgmmaOptionsArguments& args) {
    return args.work_items.items;
}
inline int items_behind_counter(const BackwardWgmmaOptionsArguments&) { return 0; }
template <class Arguments> inline int* order_behind_counter(const Arguments& args) {
    return counter_behind_ranges(args) + 1 + items_behind_counter(args);
}
