// What the user's mask_mod says of each tile of BLOCK_Q queries and BLOCK_K keys: a Visibility in a
// byte (score/expression_flags.cuh), for the kernels that skip tiles (pair_mask.cuh). Also zeroes
// the dynamic scheduler's counter.
//
// Intervals decide most tiles. In the others pairs are tested, a query and 32 keys at a time, until
// a visible pair and a masked one have been found. Only the pairs that CAUSAL and WINDOW leave
// count: a tile without any is NONE, and one that they cut may be PARTLY where it is ALL.
//
// Grid: a warp a flag, key tiles fastest, then query tiles, heads and batches. Block: NUM_THREADS
// threads.
// Constants: Element, Arguments, MASK_MOD, CAUSAL, WINDOW, FLAGS_OF_GROUPS, BLOCK_Q, BLOCK_K,
// NUM_THREADS. No shared memory.
//
// Bad at: masks that intervals cannot bound and whose tiles have pairs of one kind alone.
#include "score/pair_mask.cuh"

// A tile's pairs, within the arrays.
struct PairRange { int first_query, last_query, first_key, last_key; };

// Of one head's pairs; whole warp. is_cut: CAUSAL or WINDOW may mask some.
inline Visibility visibility_of(
    const PairMask& pair_mask, const Mask<CAUSAL, WINDOW>& mask, PairRange pairs, bool is_cut) {
    const Visibility bound = pair_mask.user.template visibility<true>(
        pairs.first_query, pairs.last_query, pairs.first_key, pairs.last_key);
    if (bound != Visibility::PARTLY) return bound;
    bool has_visible = false, has_masked = is_cut;
    for (int query = pairs.first_query; query <= pairs.last_query; ++query) {
        for (int first = pairs.first_key; first <= pairs.last_key; first += 32) {
            const int key = first + threadIdx.x % 32;
            const bool counts = key <= pairs.last_key && mask.visible(query, key);
            const bool visible = counts && pair_mask.user.visible(query, key);
            has_visible |= __ballot_sync(0xFFFFFFFFu, visible) != 0;
            has_masked |= __ballot_sync(0xFFFFFFFFu, counts && !visible) != 0;
        }
        if (has_visible && has_masked) return Visibility::PARTLY;
    }
    return has_visible ? Visibility::ALL : Visibility::NONE;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
tile_flags(const __grid_constant__ Arguments args) {
    const Shape& shape = arrays_of(args).shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const int q_tiles = mask.num_tiles(shape.seqlen_q, BLOCK_Q);
    const int k_tiles = mask.num_tiles(shape.seqlen_k, BLOCK_K);
    const int heads = heads_of_flags(args), batches = MASK_OF_BATCH ? shape.batch : 1;
    const i64 number = i64(blockIdx.x) * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (number == 0 && threadIdx.x == 0) clear_tile_counter(args);
    if (number >= i64(batches) * heads * q_tiles * k_tiles) return;
    const int k_tile = number % k_tiles, q_tile = number / k_tiles % q_tiles;
    const int row = number / k_tiles / q_tiles, batch = row / heads;
    const int members = MASK_OF_HEAD && FLAGS_OF_GROUPS ? heads_of_group(args) : 1;
    const int first_head = row % heads * members;

    const KeyTiles tiles = mask.key_tiles(q_tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
    const PairRange pairs = {
        q_tile * BLOCK_Q, min((q_tile + 1) * BLOCK_Q, shape.seqlen_q) - 1,
        k_tile * BLOCK_K, min((k_tile + 1) * BLOCK_K, shape.seqlen_k) - 1};
    Visibility flag = Visibility::NONE;
    if (k_tile >= tiles.first && k_tile < tiles.num_visited) {
        PairMask pair_mask(args, batch);
        const bool is_cut = (CAUSAL || WINDOW) && !tiles.full(k_tile);
        for (int member = 0; member < members; ++member) {
            pair_mask.set_head(first_head + member);
            const Visibility own = visibility_of(pair_mask, mask, pairs, is_cut);
            if (member > 0 && own != flag) flag = Visibility::PARTLY;
            else flag = own;
            if (flag == Visibility::PARTLY) break;
        }
    }
    if (threadIdx.x % 32 == 0) args.tile_flags[number] = static_cast<unsigned char>(flag);
}
