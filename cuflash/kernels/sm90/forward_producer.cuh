// Producer warpgroup of forward.cu. Q and K/V have separate producer threads, so loading the next Q
// does not wait for this tile's last K/V. With SPARSE_TILES a whole warp produces K and V.
#pragma once
#include "sm90/forward_query_producer.cuh"
#include "sm90/forward_shared.cuh"

// K/V producer: one thread loads the key tiles of each query tile, from the last to the first.
__device__ __forceinline__ void load_keys(const Arguments& args, SharedPlan& shared) {
    const Shape& shape = args.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    TileScheduler scheduler(args);
    PipelineState<KV_STAGES> stage;
    for (;;) {
        const WorkTile work = scheduler.acquire(args, shared);
        if (work.num_rows == 0) return;
        const int batch = work.batch, kv_head = work.head / group_size;
        const int first_k = work.first_k;
        const int first_tile =
            KEY_PARTS ? work.first : first_key_tile(mask_of(args, work), work.q_start);
        for (int tile = work.num_visited - 1; tile >= first_tile; --tile, stage.next()) {
            if (PACKED && tile == min(first_tile + REQUEST_AHEAD, work.num_visited - 1))
                shared.work_tiles.request();
            mbarrier_wait(shared_address(&shared.k_empty[stage.index]), stage.phase ^ 1);
            tma_load_tile<BLOCK_K, HEAD_DIM>(
                shared_address(&shared.k[stage.index]), args.k_map,
                shared_address(&shared.k_full[stage.index]), first_k + tile * BLOCK_K, kv_head,
                batch);
            mbarrier_wait(shared_address(&shared.v_empty[stage.index]), stage.phase ^ 1);
            tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                shared_address(&shared.v[stage.index]), args.v_map,
                shared_address(&shared.v_full[stage.index]), first_k + tile * BLOCK_K, kv_head,
                batch);
        }
    }
}

// ---- Sparse key tiles ----

// A lane's share of a key tile's segment ids. They are loaded to registers before the tile's stage
// is free, so that only the store waits for it.
struct LaneSegmentIds {
    int ids[(BLOCK_K + 31) / 32];
    __device__ __forceinline__ void load(const PairMask& pairs, int k_start, int seqlen_k) {
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int i = 0; i < (BLOCK_K + 31) / 32; ++i) {
                const int key = k_start + i * 32 + threadIdx.x % 32;
                ids[i] = pairs.id_of_key(min(key, seqlen_k - 1));
            }
    }
    __device__ __forceinline__ void store(int* stage) const {
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int i = 0; i < (BLOCK_K + 31) / 32; ++i) {
                const int key = i * 32 + threadIdx.x % 32;
                if (key < BLOCK_K) stage[key] = ids[i];
            }
    }
};

// The key tiles that a query tile visits, from the last to the first; with SEGMENTS only those
// whose range of ids overlaps the query tile's, with MASK_MOD only those that the user's mask does
// not hide. A whole warp examines 32 tiles at a time, one per lane, so the flags of a tile, also
// whether it is the last, are known before it is loaded.
template <class PairMask> struct SparseKeyTiles {
    const PairMask& pairs;
    KeyTiles visited;
    IdRange query_ids;
    int q_tile, first, base;                                // a lane's tile is base - lane
    u32 remaining = 0;                                      // one bit per lane: still to visit
    u32 masked = 0, one_id = 0;                             // one bit per lane: TileFlags
    u32 partly = 0, all = 0;                                // with MASK_MOD; all: nothing is masked
    int flag = 0;                                           // of a lane's tile, with MASK_MOD

    __device__ __forceinline__ SparseKeyTiles(
        const PairMask& pairs, int q_tile, const KeyTiles& visited)
        : pairs(pairs), visited(visited), q_tile(q_tile), first(visited.first),
          base(visited.num_visited + 31) {
        if constexpr (SEGMENTS) query_ids = pairs.ids_of_queries(q_tile);
        find_remaining();
    }
    // Moves to the next 32 tiles that contain a visited one; remaining stays 0 if there are none.
    __device__ __forceinline__ void find_remaining() {
        while (remaining == 0 && base - 32 >= first) {
            base -= 32;
            const int tile = base - threadIdx.x % 32;
            if constexpr (SEGMENTS) {
                const IdRange key_ids = pairs.ids_of_keys(max(tile, first));
                const bool is_one = key_ids.low == key_ids.high;
                remaining = __ballot_sync(
                    WHOLE_WARP, tile >= first && !disjoint(query_ids, key_ids));
                masked = __ballot_sync(
                    WHOLE_WARP, HAS_MASK || !is_one || query_ids.low != query_ids.high);
                one_id = __ballot_sync(WHOLE_WARP, is_one);
            } else {
                remaining = __ballot_sync(WHOLE_WARP, tile >= first);
            }
            if constexpr (MASK_MOD) {
                flag = 0;
                if (tile >= first)
                    flag = tile_flag(pairs.args, pairs.batch, pairs.head, q_tile, tile);
                const Visibility seen = static_cast<Visibility>(flag & VISIBILITY_OF_FLAG);
                remaining &= __ballot_sync(WHOLE_WARP, seen != Visibility::NONE);
                partly = __ballot_sync(WHOLE_WARP, seen == Visibility::PARTLY);
                all = __ballot_sync(WHOLE_WARP, !HAS_MASK && visited.full(tile)) & ~masked
                    & ~partly;
            }
        }
    }
    __device__ __forceinline__ bool has_more() const { return remaining != 0; }
    // has_more(), and pairs of the next tile may be masked.
    __device__ __forceinline__ bool next_is_masked() const {
        return (remaining & (0u - remaining) & ~all) != 0;
    }

    // The next tile; has_more() must hold.
    struct Tile { int number; bool is_masked, has_one_id, is_partly; int hidden; };  // see flag
    __device__ __forceinline__ Tile take() {
        const int lane = __ffs(remaining) - 1;
        Tile tile = {base - lane, (masked >> lane & 1) != 0, (one_id >> lane & 1) != 0,
                     (partly >> lane & 1) != 0, 0};
        if constexpr (MASK_MOD && HIDDEN_GROUPS > 0)
            tile.hidden = __shfl_sync(WHOLE_WARP, flag, lane) >> HIDDEN_SHIFT;
        remaining &= remaining - 1;
        find_remaining();
        return tile;
    }
};

// K/V producer with SPARSE_TILES: one warp loads the visited key tiles. If there are none, it loads
// tile 0, fully masked.
__device__ __forceinline__ void load_sparse_keys(const Arguments& args, SharedPlan& shared) {
    const Shape& shape = args.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const Mask<CAUSAL, WINDOW> mask = mask_of(args, TileSequence{});
    const int lane = threadIdx.x % 32;
    TileScheduler scheduler(args);
    PipelineState<KV_STAGES> stage;
    for (;;) {
        const QueryTile work = scheduler.acquire(args, shared);
        if (work.num_rows == 0) return;
        const int kv_head = work.head / group_size;
        PairMask pairs(args, work.batch);
        if constexpr (MASK_MOD) pairs.set_head(work.head);
        SparseKeyTiles<PairMask> tiles(
            pairs, work.q_start / BLOCK_Q, mask.key_tiles(work.q_start, work.num_rows, BLOCK_K));
        SparseKeyTiles<PairMask>::Tile tile = {0, true, false, true, 0};
        LaneSegmentIds ids;
        const auto take_tile = [&] {
            if (tiles.has_more()) tile = tiles.take();
            if (tile.is_masked) ids.load(pairs, tile.number * BLOCK_K, shape.seqlen_k);
            if (DYNAMIC_SCHEDULER && !tiles.has_more() && lane == 0) shared.work_tiles.request();
        };
        take_tile();
        for (bool last = false; !last; stage.next()) {
            last = !tiles.has_more();
            const int k_start = tile.number * BLOCK_K;
            mbarrier_wait(shared_address(&shared.k_empty[stage.index]), stage.phase ^ 1);
            if (tile.is_masked) ids.store(shared.extras.ids(stage));
            __syncwarp();                                   // before lane 0 publishes the ids
            if (lane == 0) {
                shared.extras.flags[stage.index].bits =
                    tile.number << TileFlags::TILE_SHIFT | (last ? TileFlags::LAST_BIT : 0)
                    | (tile.is_masked ? TileFlags::MASKED_BIT : 0)
                    | (tile.has_one_id ? TileFlags::ONE_ID_BIT : 0)
                    | (MASK_MOD && tile.is_partly ? TileFlags::PARTLY_BIT : 0)
                    | (MASK_MOD ? tile.hidden << TileFlags::HIDDEN_BITS : 0)
                    | (MASK_MOD && tiles.next_is_masked() ? TileFlags::NEXT_MASKED_BIT : 0);
                tma_load_tile<BLOCK_K, HEAD_DIM>(
                    shared_address(&shared.k[stage.index]), args.k_map,
                    shared_address(&shared.k_full[stage.index]), k_start, kv_head, work.batch);
            }
            // Reads what the next tile needs before lane 0 waits for V's stage.
            if (!last) take_tile();
            if (lane == 0) {
                mbarrier_wait(shared_address(&shared.v_empty[stage.index]), stage.phase ^ 1);
                tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                    shared_address(&shared.v[stage.index]), args.v_map,
                    shared_address(&shared.v_full[stage.index]), k_start, kv_head, work.batch);
            }
            __syncwarp();
        }
    }
}
