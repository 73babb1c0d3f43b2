// A row tile of a decode kernel: which queries and heads its rows are, where they are stored.
//
// Row r of a key head's row tiles is the query r / group_size of the group's head r % group_size.
#pragma once
#include "decode/parts.cuh"
#include "score/pair_mask.cuh"

struct RowTile {
    Sequence sequence;
    int kv_head, group_size, first_row;

    __device__ __forceinline__ RowTile(const Arguments& args, const Part& part)
        : sequence(part.sequence), kv_head(part.kv_head),
          group_size(group_size_of(args.arrays.shape)), first_row(part.row_tile * BLOCK_Q) {}

    __device__ __forceinline__ int query_of(int row) const {
        return (first_row + row) / group_size;
    }
    __device__ __forceinline__ int head_of(int row) const {
        return kv_head * group_size + (first_row + row) % group_size;
    }
    __device__ __forceinline__ bool exists(int row) const {
        return query_of(row) < sequence.seqlen_q;
    }
    __device__ __forceinline__ int first_query() const { return query_of(0); }
    __device__ __forceinline__ int last_query() const {
        return min(query_of(BLOCK_Q - 1), sequence.seqlen_q - 1);
    }

    // Offsets of a row in q or out, and in lse.
    __device__ __forceinline__ i64 offset(const Strides& stride, int row) const {
        return (PACKED_QUERIES ? 0 : sequence.number * stride.batch)
             + (sequence.first_query + query_of(row)) * stride.token
             + head_of(row) * stride.head;
    }
    template <class Arguments>
    __device__ __forceinline__ i64 lse_index(const Arguments& args, int row) const {
        const Shape& shape = args.arrays.shape;
        const i64 token = sequence.first_query + query_of(row);
        if constexpr (PACKED_QUERIES) return i64(head_of(row)) * args.cache.total_q + token;
        else return (i64(sequence.number) * shape.num_heads_q + head_of(row)) * shape.seqlen_q
                  + token;
    }

    // The key tiles of a part that some of its rows see.
    template <class Mask>
    __device__ __forceinline__ TileRange key_tiles(const Mask& mask, const Part& part) const {
        const int first = mask.first_key(first_query()) / BLOCK_K;
        const int end = num_tiles(mask.num_keys(last_query()), BLOCK_K);
        return {max(first, part.first_tile), min(end, part.end_tile)};
    }

    // The user's functions of a head, after set_head(): they get the sequence's own lengths.
    template <class Arguments, class ScoreMod, class PairMask>
    __device__ __forceinline__ void set_user(
        const Arguments& args, ScoreMod& score_mod, PairMask& pair_mask, int head) const {
        if constexpr (KVCACHE) {
            score_mod.set_user(args, sequence.number, head, sequence.seqlen_q, sequence.seqlen_k);
            pair_mask.set_user(sequence.number, sequence.seqlen_q, sequence.seqlen_k);
        }
    }

    // The user's mask of all rows, if it does not depend on the head.
    template <class Arguments>
    __device__ __forceinline__ PairMaskOf<Arguments> user_mask(const Arguments& args) const {
        PairMaskOf<Arguments> pair_mask(args, sequence.number);
        if constexpr (MASK_MOD && !MASK_OF_HEAD) {
            pair_mask.set_head(head_of(0));
            if constexpr (KVCACHE)
                pair_mask.set_user(sequence.number, sequence.seqlen_q, sequence.seqlen_k);
        }
        return pair_mask;
    }
    // What intervals tell of it for `count` keys from first_key on. Any threads.
    template <class PairMask>
    __device__ __forceinline__ Visibility user_visibility(
        const PairMask& pair_mask, int first_key, int count) const {
        const int last_key = min(first_key + count, sequence.seqlen_k) - 1;
        return pair_mask.user.template visibility<false>(
            first_query(), last_query(), first_key, last_key);
    }

    // The same tiles without those at either end that the user's mask hides from all rows, as far
    // as intervals tell. Whole warp, which asks for 32 tiles at a time.
    template <class PairMask>
    __device__ __forceinline__ TileRange unhidden(
        const PairMask& pair_mask, TileRange tiles) const {
        if constexpr (MASK_MOD && !MASK_OF_HEAD) {
            const auto is_visited = [&](int tile) {
                return user_visibility(pair_mask, tile * BLOCK_K, BLOCK_K) != Visibility::NONE;
            };
            tiles.first = PairMask::first_tile(tiles.first, tiles.end, is_visited);
            tiles.end = PairMask::last_tile(tiles.first, tiles.end, is_visited) + 1;
        }
        return tiles;
    }

    // Whether some row does not see some of `count` keys from first_key on.
    template <class Mask, class PairMask>
    __device__ __forceinline__ bool masks(
        const Mask& mask, const PairMask& pair_mask, int first_key, int count) const {
        if (first_key + count > mask.num_keys(first_query())
            || (WINDOW && first_key < mask.first_key(last_query()))) return true;
        if constexpr (MASK_MOD && !MASK_OF_HEAD && !SEGMENTS && !HAS_MASK)
            return user_visibility(pair_mask, first_key, count) != Visibility::ALL;
        return PAIRWISE;
    }
};
