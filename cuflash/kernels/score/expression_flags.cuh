// What the user's mask_mod says of a whole tile of pairs (MASK_MOD): the flag that
// prepare/tile_flags.cu has left, or, for packed sequences, what intervals tell at once.
//
// The flags are a Visibility in a byte each, contiguous (batch, heads, q_tiles, k_tiles). An axis
// that the mask does not depend on (MASK_OF_BATCH, MASK_OF_HEAD) has length 1. FLAGS_OF_GROUPS:
// heads are those of keys, and a flag is NONE or ALL if it is for all query heads of the group.
#pragma once
#include "common/constants.cuh"
#include "score/expression.cuh"

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

// `user` is that of query head `head`. Called by any threads.
template <class User, class Arguments>
inline Visibility user_visibility(
    const User& user, const Arguments& args, int batch, int head, int q_tile, int k_tile) {
    if constexpr (!PACKED) {
        return static_cast<Visibility>(
            args.tile_flags[flag_index(args, batch, head, q_tile, k_tile)]);
    } else {
        if (MASK_OF_HEAD && FLAGS_OF_GROUPS && heads_of_group(args) > 1) return Visibility::PARTLY;
        const Shape& shape = arrays_of(args).shape;
        return user.template visibility<false>(
            q_tile * BLOCK_Q, min((q_tile + 1) * BLOCK_Q, shape.seqlen_q) - 1,
            k_tile * BLOCK_K, min((k_tile + 1) * BLOCK_K, shape.seqlen_k) - 1);
    }
}
