// What the user's mask_mod says of each tile of BLOCK_Q queries and BLOCK_K keys: a Visibility in a
// byte (score/expression_flags.cuh), for the kernels that skip tiles (pair_mask.cuh); and the bits
// of the pairs of partly visible tiles (MASK_BITS), for kernels that read them. Also zeroes the
// dynamic scheduler's counter.
//
// First each warp looks at its tiles: intervals decide most. Without MASK_BITS it also tests 32
// pairs on both diagonals, which find a visible pair and a masked one in nearly every tile that has
// both.
// Then the block tests all pairs of one undecided tile after another, 32 a thread. Only the pairs
// that CAUSAL and WINDOW leave count: a tile without any is NONE, and one that they cut may be
// PARTLY where it is ALL.
//
// Grid: a warp a flag. With CAUSAL or WINDOW, a warp has a flag and the one that is as far from the
// last as that from the first: where one lies below the diagonal, the other lies above it. Flags
// lie key tiles fastest, then query tiles, heads and batches. A block's are of one head, as many
// apart as the head has blocks: undecided tiles are neighbours. Block: NUM_THREADS threads.
// Constants: Element, Arguments, MASK_MOD, CAUSAL, WINDOW, FLAGS_OF_GROUPS, MASK_BITS, BLOCK_Q,
// BLOCK_K, NUM_THREADS. Shared memory: a FoundFlag a tile of the block.
//
// Small: the kernel's instructions come from memory, which takes longer than most tiles, so loops
// are not unrolled far.
//
// Bad at: masks that intervals cannot bound, where it tests every pair of every tile.
#include "score/pair_mask.cuh"

static_assert(!(MASK_BITS && MASK_OF_HEAD), "heads share the bits");

constexpr int WARPS = NUM_THREADS / 32;
constexpr int TILES_OF_WARP = CAUSAL || WINDOW ? 2 : 1;
constexpr int UNDECIDED = 3;                                // after a warp's look

// A tile, and its pairs within the arrays. is_cut: CAUSAL or WINDOW may mask some; is_outside: all.
struct FlaggedTile {
    int batch, head;                                        // head: the first that shares the flag
    int q_tile, k_tile, first_query, last_query, first_key, last_key;
    bool is_cut, is_outside;
};

// row: batch and head.
inline FlaggedTile tile_of_flag(
    const Arguments& args, const Mask<CAUSAL, WINDOW>& mask, u32 row, int q_tile, int k_tile,
    int members) {
    const u32 heads = heads_of_flags(args);
    const KeyTiles tiles = mask.key_tiles(q_tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
    return {
        .batch = static_cast<int>(row / heads), .head = static_cast<int>(row % heads) * members,
        .q_tile = q_tile, .k_tile = k_tile,
        .first_query = q_tile * BLOCK_Q,
        .last_query = min((q_tile + 1) * BLOCK_Q, mask.seqlen_q) - 1,
        .first_key = k_tile * BLOCK_K,
        .last_key = min((k_tile + 1) * BLOCK_K, mask.seqlen_k) - 1,
        .is_cut = (CAUSAL || WINDOW) && !tiles.full(k_tile),
        .is_outside = k_tile < tiles.first || k_tile >= tiles.num_visited};
}

// What has been seen of a tile's pairs.
struct Seen {
    bool visible = false, masked = false;
    bool both() const { return visible && masked; }
    Visibility visibility() const {
        return both() ? Visibility::PARTLY : visible ? Visibility::ALL : Visibility::NONE;
    }
};

// 32 pairs of a tile, one a lane, from corner to corner. Whole warp.
inline void look_at_diagonals(
    Seen& seen, const PairMask& pair_mask, const Mask<CAUSAL, WINDOW>& mask,
    const FlaggedTile& tile) {
    const int step = threadIdx.x % 16;
    const int by_key = (tile.last_key - tile.first_key) * step / 15;
    const int query = tile.first_query + (tile.last_query - tile.first_query) * step / 15;
    const int key = threadIdx.x % 32 < 16 ? tile.first_key + by_key : tile.last_key - by_key;
    const bool counts = mask.visible(query, key);
    const bool visible = counts && pair_mask.user.visible(query, key);
    seen.visible |= __ballot_sync(0xFFFFFFFFu, visible) != 0;
    seen.masked |= __ballot_sync(0xFFFFFFFFu, counts && !visible) != 0;
}

// The flag of a tile, or UNDECIDED. Whole warp.
inline int look_at_tile(
    const Arguments& args, const Mask<CAUSAL, WINDOW>& mask, const FlaggedTile& tile, int members) {
    if (tile.is_outside) return static_cast<int>(Visibility::NONE);
    PairMask pair_mask(args, tile.batch);
    Seen seen;
    bool is_decided = true;
    for (int member = 0; member < members && !seen.both(); ++member) {
        pair_mask.set_head(tile.head + member);
        const Visibility bound = pair_mask.user.template visibility<true>(
            tile.first_query, tile.last_query, tile.first_key, tile.last_key);
        seen.visible |= bound == Visibility::ALL;
        seen.masked |= bound == Visibility::NONE;
        if (bound != Visibility::PARTLY) continue;
        is_decided = false;
        seen.masked |= tile.is_cut;
        if constexpr (!MASK_BITS) look_at_diagonals(seen, pair_mask, mask, tile);
    }
    const bool is_known = is_decided || (!MASK_BITS && seen.both());
    return is_known ? static_cast<int>(seen.visibility()) : UNDECIDED;
}

// Which groups of 64 rows CAUSAL or WINDOW leave nothing of the tile, a bit each.
inline u32 groups_outside(const Mask<CAUSAL, WINDOW>& mask, const FlaggedTile& tile) {
    u32 groups = 0;
    if constexpr (CAUSAL || WINDOW)
        #pragma unroll
        for (int group = 0; group < HIDDEN_GROUPS; ++group) {
            const int first = tile.first_query + group * 64;
            const KeyTiles tiles = mask.key_tiles(first, 64, BLOCK_K);
            if (tile.k_tile < tiles.first || tile.k_tile >= tiles.num_visited)
                groups |= 1u << group;
        }
    return groups;
}

// 32 pairs, as TileBits has them: from the lane's first row and column of a word. INSIDE: those
// within the arrays read nothing outside the user's arrays; others are taken to be their last ones.
struct Word { u32 visible, counted; };                      // visible and counted; counted
template <bool INSIDE>
inline Word test_word(
    const MaskExpression& user, const Mask<CAUSAL, WINDOW>& mask, const FlaggedTile& tile, int row,
    int column) {
    Word word = {0, 0};
    #pragma unroll 2
    for (int j = 0; j < 8; ++j)
        #pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int along = row + n / 2 * 8, across = column + j * 8 + n % 2;
            const int query = FLAGS_OF_GROUPS ? across : along;
            const int key = FLAGS_OF_GROUPS ? along : across;
            const u32 bit = 1u << (j * 4 + n);
            const int read_query = INSIDE ? min(query, tile.last_query) : query;
            const int read_key = INSIDE ? min(key, tile.last_key) : key;
            if (user.template visible<INSIDE>(read_query, read_key)) word.visible |= bit;
            if (query <= tile.last_query && key <= tile.last_key && mask.visible(query, key))
                word.counted |= bit;
        }
    word.visible &= word.counted;                           // not in between: no branches
    return word;
}

// The flag of a tile by all its pairs, whose bits MASK_BITS keeps. Whole block.
inline int test_pairs(
    const Arguments& args, const Mask<CAUSAL, WINDOW>& mask, const FlaggedTile& tile, int members) {
    constexpr bool OF_KEYS = FLAGS_OF_GROUPS;
    const int lane = threadIdx.x % 32;
    const int first_row = (OF_KEYS ? tile.first_key : tile.first_query) + lane / 4;
    const int first_column = (OF_KEYS ? tile.first_query : tile.first_key) + lane % 4 * 2;
    PairMask pair_mask(args, tile.batch);
    Seen seen;
    u32 seen_groups = 0;                                    // of 64 rows
    seen.masked = tile.is_cut;
    for (int member = 0; member < members; ++member) {
        pair_mask.set_head(tile.head + member);
        const bool is_inside = MaskExpression::READS && pair_mask.user.reads_inside(
            tile.first_query, tile.last_query, tile.first_key, tile.last_key);
        #pragma unroll 1
        for (int word = threadIdx.x; word < TileBits::COUNT; word += NUM_THREADS) {
            const int row = first_row + word / 32 / TileBits::WORDS * 16;
            const int column = first_column + word / 32 % TileBits::WORDS * 64;
            const Word tested = is_inside
                ? test_word<true>(pair_mask.user, mask, tile, row, column)
                : test_word<false>(pair_mask.user, mask, tile, row, column);
            const u32 bits = tested.visible, counted = tested.counted;
            seen.visible |= bits != 0;
            seen.masked |= bits != counted;
            if (bits != 0) seen_groups |= 1u << word / (4 * TileBits::WORDS * 32);
            if constexpr (MASK_BITS)
                bits_of_tile(args, tile.batch, tile.q_tile, tile.k_tile)[word] = bits;
        }
        seen.visible = __syncthreads_or(seen.visible) != 0;
        seen.masked = __syncthreads_or(seen.masked) != 0;
        if (seen.both()) break;
    }
    u32 hidden_groups = 0;
    #pragma unroll
    for (int group = 0; group < HIDDEN_GROUPS; ++group)
        if (!__syncthreads_or(seen_groups >> group & 1)) hidden_groups |= 1u << group;
    return static_cast<int>(seen.visibility()) | hidden_groups << HIDDEN_SHIFT;
}

// Where the kernels would visit a tile of which nothing is visible, as they visit one at least: the
// first of a query tile; backward, of a key tile. Whole warp.
inline void clear_first_bits(
    const Arguments& args, const Mask<CAUSAL, WINDOW>& mask, const FlaggedTile& tile) {
    const bool is_first = FLAGS_OF_GROUPS
        ? tile.q_tile == mask.query_tiles(tile.first_key, BLOCK_Q, BLOCK_K).first
        : tile.k_tile == 0;
    if (!is_first) return;
    u32* bits = bits_of_tile(args, tile.batch, tile.q_tile, tile.k_tile);
    #pragma unroll 1
    for (int word = threadIdx.x % 32; word < TileBits::COUNT; word += 32) bits[word] = 0;
}

// What a warp's look has left, of one of its tiles; `flag` may be UNDECIDED.
struct FoundFlag { int flag, q_tile, k_tile; };

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
tile_flags(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    FoundFlag* found = reinterpret_cast<FoundFlag*>(shared_bytes);
    const Shape& shape = arrays_of(args).shape;
    const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    const u32 k_tiles = mask.num_tiles(shape.seqlen_k, BLOCK_K);
    const u32 count = mask.num_tiles(shape.seqlen_q, BLOCK_Q) * k_tiles;
    const u32 warps = (count + TILES_OF_WARP - 1) / TILES_OF_WARP;                  // of a head
    const u32 blocks = (warps + WARPS - 1) / WARPS, row = blockIdx.x / blocks;
    const int members = MASK_OF_HEAD && FLAGS_OF_GROUPS ? heads_of_group(args) : 1;
    const int warp = threadIdx.x / 32;
    const u32 own = blockIdx.x % blocks + warp * blocks;
    unsigned char* flags = args.tile_flags + i64(row) * count;
    if (blockIdx.x == 0 && threadIdx.x == 0) clear_tile_counter(args);

    #pragma unroll 1
    for (int i = 0; i < TILES_OF_WARP; ++i) {
        const u32 number = i == 0 ? own : count - 1 - own;
        FoundFlag look = {static_cast<int>(Visibility::NONE), 0, 0};
        if (own < warps && (i == 0 || number != own)) {
            look.q_tile = number / k_tiles;
            look.k_tile = number % k_tiles;
            const FlaggedTile tile =
                tile_of_flag(args, mask, row, look.q_tile, look.k_tile, members);
            look.flag = look_at_tile(args, mask, tile, members);
            if (MASK_BITS && look.flag == static_cast<int>(Visibility::NONE))
                clear_first_bits(args, mask, tile);
            look.flag |= groups_outside(mask, tile) << HIDDEN_SHIFT;
            if (threadIdx.x % 32 == 0) flags[number] = static_cast<unsigned char>(look.flag);
        }
        if (threadIdx.x % 32 == 0) found[i * WARPS + warp] = look;
    }
    __syncthreads();                                        // all are written
    #pragma unroll 1
    for (int i = 0; i < TILES_OF_WARP * WARPS; ++i) {
        const FoundFlag look = found[i];
        if ((look.flag & VISIBILITY_OF_FLAG) != UNDECIDED) continue;
        const FlaggedTile tile = tile_of_flag(args, mask, row, look.q_tile, look.k_tile, members);
        const int tested = test_pairs(args, mask, tile, members);
        if (threadIdx.x == i % WARPS * 32)                  // after its own look's
            flags[look.q_tile * k_tiles + look.k_tile] =
                static_cast<unsigned char>(tested | (look.flag & ~VISIBILITY_OF_FLAG));
    }
}
