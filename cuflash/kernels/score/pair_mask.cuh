// (query, key) pairs that a call masks within the bounds of mask.cuh: pairs of unequal segment ids
// (SEGMENTS), pairs where a boolean mask is 0 (HAS_MASK), and pairs that the user's mask_mod hides
// (MASK_MOD, expression.cuh).
//
// The ranges of ids that prepare/segment_ranges.cu computes (segment_ranges.cuh) answer for a whole
// tile of pairs, and so do the flags of prepare/tile_flags.cu for mask_mod (expression_flags.cuh).
// A boolean mask may mask part of any tile.
#pragma once
#include "common/mask.cuh"
#include "score/expression.cuh"
#include "score/expression_flags.cuh"
#include "score/segment_ranges.cuh"

constexpr bool PAIRWISE = SEGMENTS || HAS_MASK || MASK_MOD;    // some pairs need their own test
constexpr bool SKIPS_TILES = SEGMENTS || MASK_MOD;          // within the bounds of mask.cuh

// The user's function of one head.
template <class Arguments, bool> struct UserMask { MaskExpression user; };
template <class Arguments> struct UserMask<Arguments, false> {};

// One head's pairs. Strides and addresses are computed at each use, to keep registers free between.
template <class Arguments> struct PairMaskOf : UserMask<Arguments, MASK_MOD> {
    const Arguments& args;
    int batch, head = 0;

    PairMaskOf(const Arguments& args, int batch) : args(args), batch(batch) {}
    void set_head(int new_head) {
        if constexpr (HAS_MASK || MASK_MOD) head = new_head;
        if constexpr (MASK_MOD) {
            const Shape& shape = arrays_of(args).shape;
            if constexpr (PACKED)
                set_user(args.options.sequence, shape.seqlen_q, shape.seqlen_k);
            else
                set_user(batch, shape.seqlen_q, shape.seqlen_k);
        }
    }
    // After set_head(), in kernels whose blocks take one packed sequence after another.
    void set_user(int sequence, int seqlen_q, int seqlen_k) {
        if constexpr (MASK_MOD) this->user.set_head(args, sequence, head, seqlen_q, seqlen_k);
    }

    // A pair within the arrays.
    bool visible(int query, int key) const {
        if constexpr (SEGMENTS)
            if (id_of_query(query) != id_of_key(key)) return false;
        if constexpr (HAS_MASK)
            if (!keeps(query, key)) return false;
        if constexpr (MASK_MOD)
            if (!this->user.visible(query, key)) return false;
        return true;
    }

    // ---- Segment ids ----

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
    IdRange ids_of_queries(int tile) const { return query_tile_ids(args, batch, tile); }
    IdRange ids_of_keys(int tile) const { return key_tile_ids(args, batch, tile); }

    // ---- Boolean mask ----

    const unsigned char* mask_byte(int query, int key) const {
        const PairStrides& stride = args.options.mask_stride;
        return static_cast<const unsigned char*>(args.mask)
             + batch * stride.batch + head * stride.head
             + query * stride.query + key * stride.key;
    }
    bool keeps(int query, int key) const { return *mask_byte(query, key) != 0; }

    // Of four bytes, bit n: whether the n-th is not 0. That becomes the upper bit of each byte; the
    // multiplication then gathers the four bits side by side, and no carry reaches them.
    static u32 nonzero_bytes(u32 word) {
        const u32 flags = ((word & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | word) >> 7 & 0x01010101u;
        return flags * 0x01020408u >> 24 & 0xF;
    }

    // The pairs of a query and keys key .. key + 3: bit n is 1 if the mask keeps the n-th. A pair
    // past the arrays' ends gets the bit of the last row or column. IN_WORDS requires has_words().
    template <bool IN_WORDS> u32 keeps_of_four(int query, int key) const {
        u32 bits = 0;
        if constexpr (HAS_MASK) {
            const Shape& shape = arrays_of(args).shape;
            const int row = min(query, shape.seqlen_q - 1);
            if constexpr (IN_WORDS) {
                bits = nonzero_bytes(*reinterpret_cast<const u32*>(mask_byte(row, key)));
            } else {
                #pragma unroll
                for (int n = 0; n < 4; ++n)
                    bits |= (keeps(row, min(key + n, shape.seqlen_k - 1)) ? 1u : 0u) << n;
            }
        }
        return bits;
    }
    // Whether 16 keys from a multiple of 16 on are an aligned chunk of bytes in each row.
    bool has_chunks() const {
        if constexpr (HAS_MASK) {
            const PairStrides& stride = args.options.mask_stride;
            return stride.key == 1 && stride.query % 16 == 0
                && reinterpret_cast<u64>(mask_byte(0, 0)) % 16 == 0;
        } else {
            return false;
        }
    }
    // Such a chunk. A query past the last has the last one's.
    uint4 chunk_of_mask(int query, int key) const {
        if constexpr (HAS_MASK) {
            const int row = min(query, arrays_of(args).shape.seqlen_q - 1);
            return *reinterpret_cast<const uint4*>(mask_byte(row, key));
        } else {
            return {};
        }
    }
    static u32 keeps_of_chunk(uint4 chunk) {
        return nonzero_bytes(chunk.x) | nonzero_bytes(chunk.y) << 4
             | nonzero_bytes(chunk.z) << 8 | nonzero_bytes(chunk.w) << 12;
    }
    // The same bits byte by byte, 0 for keys past the last.
    u32 keeps_of_sixteen(int query, int key) const {
        u32 bits = 0;
        if constexpr (HAS_MASK) {
            const Shape& shape = arrays_of(args).shape;
            const int row = min(query, shape.seqlen_q - 1);
            #pragma unroll
            for (int n = 0; n < 16; ++n)
                if (key + n < shape.seqlen_k) bits |= (keeps(row, key + n) ? 1u : 0u) << n;
        }
        return bits;
    }
    // Whether the bytes of any four keys from a multiple of 4 on, before `end`, are an aligned
    // word.
    bool has_words(int end) const {
        if constexpr (HAS_MASK) {
            const PairStrides& stride = args.options.mask_stride;
            return stride.key == 1 && stride.query % 4 == 0 && end <= arrays_of(args).shape.seqlen_k
                && reinterpret_cast<u64>(mask_byte(0, 0)) % 4 == 0;
        } else {
            return false;
        }
    }

    // ---- Tiles of pairs ----

    // NONE holds for all heads that share the tile: with FLAGS_OF_GROUPS those of a group, without
    // MASK_MOD all.
    Visibility visibility(int q_tile, int k_tile) const {
        Visibility of_user = Visibility::ALL;
        if constexpr (MASK_MOD) {
            of_user = user_visibility(this->user, args, batch, head, q_tile, k_tile);
            if (of_user == Visibility::NONE) return Visibility::NONE;
        }
        if constexpr (SEGMENTS) {
            const IdRange q = ids_of_queries(q_tile), k = ids_of_keys(k_tile);
            if (disjoint(q, k)) return Visibility::NONE;
            if (q.low != q.high || k.low != k.high) return Visibility::PARTLY;
        }
        return HAS_MASK ? Visibility::PARTLY : of_user;
    }
    bool skips(int q_tile, int k_tile) const {
        return SKIPS_TILES && visibility(q_tile, k_tile) == Visibility::NONE;
    }
    bool sees_all(int q_tile, int k_tile) const {
        return !PAIRWISE || visibility(q_tile, k_tile) == Visibility::ALL;
    }

    // The last tile in [first, k_tile) that is not skipped; less than `first` if there is none.
    // Called by a whole warp, which tests 32 tiles at a time.
    int key_tile_before(int q_tile, int k_tile, int first) const {
        if constexpr (SKIPS_TILES)
            return last_tile(first, k_tile, [&](int tile) { return !skips(q_tile, tile); });
        else
            return k_tile - 1;
    }
    // The same of query tiles.
    int query_tile_before(int q_tile, int k_tile, int first) const {
        if constexpr (SKIPS_TILES)
            return last_tile(first, q_tile, [&](int tile) { return !skips(tile, k_tile); });
        else
            return q_tile - 1;
    }

    // The first tile in (q_tile, end) that is not skipped; `end` if there is none.
    int query_tile_after(int q_tile, int k_tile, int end) const {
        if constexpr (SKIPS_TILES)
            return first_tile(q_tile + 1, end, [&](int tile) { return !skips(tile, k_tile); });
        else
            return q_tile + 1;
    }

    // The first tile in [first, end) that is visited; `end` if there is none.
    template <class IsVisited> static int first_tile(int first, int end, IsVisited is_visited) {
        for (int start = first; start < end; start += 32) {
            const int tile = start + threadIdx.x % 32;
            const u32 visited = __ballot_sync(0xFFFFFFFFu, tile < end && is_visited(tile));
            if (visited != 0) return start + (__ffs(visited) - 1);
        }
        return end;
    }

    // The last tile in [first, end) that is visited; first - 1 if there is none.
    template <class IsVisited> static int last_tile(int first, int end, IsVisited is_visited) {
        for (int start = end - 1; start >= first; start -= 32) {
            const int tile = start - threadIdx.x % 32;
            const u32 visited = __ballot_sync(0xFFFFFFFFu, tile >= first && is_visited(tile));
            if (visited != 0) return start - (__ffs(visited) - 1);
        }
        return first - 1;
    }

    // How many of the tiles [first, end) are visited.
    template <class IsVisited> static int count_tiles(int first, int end, IsVisited is_visited) {
        int count = 0;
        for (int start = first; start < end; start += 32) {
            const int tile = start + threadIdx.x % 32;
            count += __popc(__ballot_sync(0xFFFFFFFFu, tile < end && is_visited(tile)));
        }
        return count;
    }

    // How many of the query tiles [first, end) are not skipped.
    int query_tiles_between(int first, int end, int k_tile) const {
        if constexpr (SKIPS_TILES)
            return count_tiles(first, end, [&](int tile) { return !skips(tile, k_tile); });
        else
            return end - first;
    }

    // How many of the key tiles [first, k_tile) are not skipped.
    int key_tiles_before(int q_tile, int k_tile, int first) const {
        if constexpr (SKIPS_TILES)
            return count_tiles(first, k_tile, [&](int tile) { return !skips(q_tile, tile); });
        else
            return k_tile - first;
    }
};

using PairMask = PairMaskOf<Arguments>;
