// A row tile of a decode kernel: which queries and heads its rows are, where they are stored.
//
// Row r of a key head's row tiles is the query r / group_size of the group's head r % group_size.
#pragma once
#include "decode/parts.cuh"
#include "score/pair_mask.cuh"

// Whether intervals tell which tiles the user's mask hides from all rows; whether they tell which
// tiles are masked in part. A row tile has several heads.
constexpr bool HIDES_BY_INTERVALS = MASK_MOD && !MASK_OF_HEAD;
constexpr bool MASKS_BY_INTERVALS = HIDES_BY_INTERVALS && !SEGMENTS && !HAS_MASK;

// The key tiles that some row sees, and a run of them whose every key every row sees, within the
// bounds of mask.cuh, as far as intervals tell of the user's mask.
struct VisitedTiles : TileRange {
    TileRange full;
    __device__ __forceinline__ bool is_full(int tile) const {
        return tile >= full.first && tile < full.end;
    }
};

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
        if constexpr (HIDES_BY_INTERVALS) {
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

    // The same tiles without those at either end that the user's mask hides from all rows; the last
    // run of full ones. Whole warp, which asks for 32 tiles at a time.
    template <class PairMask>
    __device__ __forceinline__ VisitedTiles visited(
        const PairMask& pair_mask, TileRange tiles) const {
        VisitedTiles found{tiles, tiles};
        if constexpr (HIDES_BY_INTERVALS) {
            found = {{tiles.end, tiles.first}, {tiles.first, tiles.first}};
            #pragma unroll 1
            for (int start = tiles.first; start < tiles.end; start += 32) {
                const int tile = start + threadIdx.x % 32;
                Visibility of_tile = Visibility::NONE;
                if (tile < tiles.end)
                    of_tile = user_visibility(pair_mask, tile * BLOCK_K, BLOCK_K);
                const u32 seen = __ballot_sync(WHOLE_WARP, of_tile != Visibility::NONE);
                const u32 full = __ballot_sync(WHOLE_WARP, of_tile == Visibility::ALL);
                if (seen != 0) {
                    found.first = min(found.first, start + __ffs(seen) - 1);
                    found.end = start + 32 - __clz(seen);
                }
                if (full != 0) {
                    const u32 before = ~full & WHOLE_WARP >> __clz(full);   // and not full
                    if (before != 0) found.full.first = start + 32 - __clz(before);
                    else if (found.full.end != start) found.full.first = start;
                    found.full.end = start + 32 - __clz(full);
                }
            }
        }
        return found;
    }

    // Whether the bounds of mask.cuh hide some of `count` keys from first_key on from some row.
    template <class Mask>
    __device__ __forceinline__ bool is_cut(const Mask& mask, int first_key, int count) const {
        return first_key + count > mask.num_keys(first_query())
            || (WINDOW && first_key < mask.first_key(last_query()));
    }
    // Whether some row may not see some keys of a tile: of `count` from first_key on.
    template <class Mask>
    __device__ __forceinline__ bool is_masked(
        const Mask& mask, const VisitedTiles& tiles, int tile, int first_key, int count) const {
        if (is_cut(mask, first_key, count)) return true;
        return MASKS_BY_INTERVALS ? !tiles.is_full(tile) : PAIRWISE;
    }
    // Bit n: whether some row may not see some of the eight keys from first_key + 8 n on. Of a tile
    // that is_masked(). Whole warp.
    template <int EIGHTS, class Mask, class PairMask>
    __device__ __forceinline__ u32 masked_eights(
        const Mask& mask, const PairMask& pair_mask, int first_key) const {
        static_assert(EIGHTS <= 32, "a lane has eight keys at most");
        if constexpr (MASKS_BY_INTERVALS) {
            const int lane = threadIdx.x % 32, first = first_key + lane * 8;
            const bool found = lane < EIGHTS && (is_cut(mask, first, 8)
                || user_visibility(pair_mask, first, 8) != Visibility::ALL);
            return __ballot_sync(WHOLE_WARP, found);
        } else {
            return WHOLE_WARP >> (32 - EIGHTS);
        }
    }
};
