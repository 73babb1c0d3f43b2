// What the user's mask_mod says of a whole tile of pairs (MASK_MOD): the flag that
// prepare/tile_flags.cu has left, or, for packed sequences, what intervals tell at once.
//
// The flags are a Visibility in a byte each, contiguous (batch, heads, q_tiles, k_tiles). An axis
// that the mask does not depend on (MASK_OF_BATCH, MASK_OF_HEAD) has length 1. FLAGS_OF_GROUPS:
// heads are those of keys, and a flag is NONE or ALL if it is for all query heads of the group.
// Forward, the bits from HIDDEN_SHIFT on tell of each 64 queries of a tile that has several such
// whether they see none of the keys, for kernels whose warpgroups have 64 queries.
//
// MASK_BITS: beside the flags stand the bits of each partly visible tile's pairs, in the order of
// an MMA's fragments (TileBits): which CAUSAL, WINDOW, lengths and the user's mask leave. The mask
// does not depend on the head, so all heads share them.
#pragma once
#include "common/constants.cuh"
#include "score/expression.cuh"

constexpr int VISIBILITY_OF_FLAG = 3, HIDDEN_SHIFT = 2;
constexpr int HIDDEN_GROUPS = FLAGS_OF_GROUPS || BLOCK_Q <= 64 ? 0 : (BLOCK_Q + 63) / 64;

template <class Arguments> inline int heads_of_group(const Arguments& args) {
    const Shape& shape = arrays_of(args).shape;
    return shape.num_heads_q / shape.num_heads_kv;
}

// Heads of the flags.
template <class Arguments> inline int heads_of_flags(const Arguments& args) {
    const Shape& shape = arrays_of(args).shape;
    return !MASK_OF_HEAD ? 1 : FLAGS_OF_GROUPS ? shape.num_heads_kv : shape.num_heads_q;
}

// The flag of a tile, for query head `head`.
template <class Arguments>
inline i64 flag_index(const Arguments& args, int batch, int head, int q_tile, int k_tile) {
    const Shape& shape = arrays_of(args).shape;
    const int q_tiles = (shape.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    const int k_tiles = (shape.seqlen_k + BLOCK_K - 1) / BLOCK_K;
    const int own_batch = MASK_OF_BATCH ? batch : 0;
    const int own_head = !MASK_OF_HEAD ? 0 : FLAGS_OF_GROUPS ? head / heads_of_group(args) : head;
    return ((i64(own_batch) * heads_of_flags(args) + own_head) * q_tiles + q_tile) * k_tiles
         + k_tile;
}

// The flag of a tile. Called by any threads.
template <class Arguments>
inline int tile_flag(const Arguments& args, int batch, int head, int q_tile, int k_tile) {
    return args.tile_flags[flag_index(args, batch, head, q_tile, k_tile)];
}

// The bits of a tile's pairs: u32 mask_bits[tile][16 rows][word][lane], a tile's number being its
// flag's. Rows are queries; with FLAGS_OF_GROUPS (backward) keys. Bit 4 j + 2 h + b of a lane's
// word w belongs to row lane / 4 + 8 h of the 16 and to column 64 w + 8 j + lane % 4 * 2 + b: the
// order in which an accumulator holds them.
struct TileBits {
    static constexpr int ROWS = FLAGS_OF_GROUPS ? BLOCK_K : BLOCK_Q;
    static constexpr int WORDS = ((FLAGS_OF_GROUPS ? BLOCK_Q : BLOCK_K) + 63) / 64;
    static constexpr int COUNT = (ROWS + 15) / 16 * WORDS * 32;     // u32 of a tile
};

template <class Arguments>
inline u32* bits_of_tile(const Arguments& args, int batch, int q_tile, int k_tile) {
    return args.mask_bits + flag_index(args, batch, 0, q_tile, k_tile) * TileBits::COUNT;
}

// A lane's words of 16 rows, the first of which is `row` of the tile.
template <class Arguments, int WORDS>
inline void load_mask_bits(
    u32 (&words)[WORDS], const Arguments& args, int batch, int q_tile, int k_tile, int row) {
    static_assert(WORDS == TileBits::WORDS, "a fragment has all columns of the tile");
    const u32* bits = bits_of_tile(args, batch, q_tile, k_tile)
                    + row / 16 * (TileBits::WORDS * 32) + threadIdx.x % 32;
    #pragma unroll
    for (int word = 0; word < WORDS; ++word) words[word] = bits[word * 32];
}

// `user` is that of query head `head`. Called by any threads.
template <class User, class Arguments>
inline Visibility user_visibility(
    const User& user, const Arguments& args, int batch, int head, int q_tile, int k_tile) {
    if constexpr (!PACKED) {
        return static_cast<Visibility>(
            tile_flag(args, batch, head, q_tile, k_tile) & VISIBILITY_OF_FLAG);
    } else {
        if (MASK_OF_HEAD && FLAGS_OF_GROUPS && heads_of_group(args) > 1) return Visibility::PARTLY;
        const Shape& shape = arrays_of(args).shape;
        return user.template visibility<false>(
            q_tile * BLOCK_Q, min((q_tile + 1) * BLOCK_Q, shape.seqlen_q) - 1,
            k_tile * BLOCK_K, min((k_tile + 1) * BLOCK_K, shape.seqlen_k) - 1);
    }
}
