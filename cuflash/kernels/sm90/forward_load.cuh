// forward.cu's producer warpgroup: one thread loads Q, one (or with SPARSE_TILES a warp) K and V.
#pragma once
#include "sm90/forward_scheduler.cuh"

// Two threads load, so that the next Q need not wait for this one's last keys. The first also says
// what to do: the work goes with its Q.
__device__ __forceinline__ void load_queries(const Arguments& arguments,
                                             SharedPlan& shared) {
    Tiles tiles(arguments);
    PipelineState<1> asking;
    for (PipelineState<Q_STAGES> ring;; ring.next(), asking.next()) {
        shared.work.await_asking(asking.phase ^ 1);
        if (DYNAMIC_SCHEDULER) __syncwarp();                // all lanes have, before it asks again
        const Work now = next_work(tiles, arguments);
        if (DYNAMIC_SCHEDULER && threadIdx.x != 0) {
            if (now.queries.num_rows == 0) return;
            continue;
        }
        const u32 full = shared_address(&shared.q_full[ring.index]);
        mbarrier_wait(shared_address(&shared.q_empty[ring.index]), ring.phase ^ 1);
        shared.work[work_slot(ring)] = now;
        shared.work.tell(work_slot(ring));
        if (now.queries.num_rows == 0) {
            mbarrier_arrive(full);
            return;
        }
        tma_load_tile<BLOCK_Q, HEAD_DIM>(
            shared_address(&shared.q_then_out[ring.index]), arguments.q_map, full,
            now.queries.first_q + now.queries.first, now.queries.head, now.queries.batch);
    }
}

__device__ __forceinline__ void load_keys(const Arguments& arguments,
                                          SharedPlan& shared) {
    const Shape& shape = arguments.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    Tiles tiles(arguments);
    PipelineState<KV_STAGES> ring;
    for (;;) {
        const Work now = tiles.told(arguments, shared);
        if (now.queries.num_rows == 0) return;
        const int batch = now.queries.batch, head = now.queries.head / group_size;
        const int first = now.queries.first_k;
        const int first_tile = first_key_tile(mask_of(arguments, now.queries), now.queries.first);
        for (int tile = now.num_visited - 1; tile >= first_tile; --tile, ring.next()) {
            if (PACKED && tile == min(first_tile + TAKEN_BEFORE, now.num_visited - 1))
                shared.work.ask();
            mbarrier_wait(shared_address(&shared.k_empty[ring.index]), ring.phase ^ 1);
            tma_load_tile<BLOCK_K, HEAD_DIM>(
                shared_address(&shared.k[ring.index]), arguments.k_map,
                shared_address(&shared.k_full[ring.index]), first + tile * BLOCK_K, head, batch);
            mbarrier_wait(shared_address(&shared.v_empty[ring.index]), ring.phase ^ 1);
            tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                shared_address(&shared.v[ring.index]), arguments.v_map,
                shared_address(&shared.v_full[ring.index]), first + tile * BLOCK_K, head, batch);
        }
    }
}

// A lane's share of a key tile's ids on their way: from global memory before their place is free.
struct LaneIds {
    int ids[(BLOCK_K + 31) / 32];
    __device__ __forceinline__ void load(const Pairs& pairs, int k_start, int seqlen_k) {
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int i = 0; i < (BLOCK_K + 31) / 32; ++i) {
                const int key = k_start + i * 32 + threadIdx.x % 32;
                ids[i] = pairs.id_of_key(min(key, seqlen_k - 1));
            }
    }
    __device__ __forceinline__ void store(int* place) const {
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int i = 0; i < (BLOCK_K + 31) / 32; ++i) {
                const int key = i * 32 + threadIdx.x % 32;
                if (key < BLOCK_K) place[key] = ids[i];
            }
    }
};

// The key tiles that a query tile visits, from the last one down: of those that the mask lets it,
// with SEGMENTS, the ones that may have an id in common with it. By a whole warp, which looks at 32
// tiles at a time, a lane at one: so all that is to be said of a tile is known before it comes.
template <class Pairs> struct ListedTiles {
    const Pairs& pairs;
    Range queries;                                          // their ids
    int first, from;                                        // a lane's tile is from - lane
    u32 left = 0;                                           // a bit a lane: it is still to come
    u32 hidden = 0, of_one_id = 0;                          // pairs of it are; all its ids are one

    __device__ __forceinline__ ListedTiles(const Pairs& pairs, int q_tile, const KeyTiles& visited)
        : pairs(pairs), first(visited.first), from(visited.num_visited + 31) {
        if constexpr (SEGMENTS) queries = pairs.of_queries(q_tile);
        look_further();
    }
    // To where there are tiles left, if anywhere.
    __device__ __forceinline__ void look_further() {
        while (left == 0 && from - 32 >= first) {
            from -= 32;
            const int tile = from - threadIdx.x % 32;
            if constexpr (SEGMENTS) {
                const Range keys = pairs.of_keys(max(tile, first));
                const bool is_one = keys.low == keys.high;
                left = __ballot_sync(WHOLE_WARP, tile >= first && !are_apart(queries, keys));
                hidden = __ballot_sync(
                    WHOLE_WARP, HAS_MASK || !is_one || queries.low != queries.high);
                of_one_id = __ballot_sync(WHOLE_WARP, is_one);
            } else {
                left = __ballot_sync(WHOLE_WARP, tile >= first);
            }
        }
    }
    __device__ __forceinline__ bool has_more() const { return left != 0; }

    // The next one. There is one.
    struct Tile { int number; bool hides, has_one_id; };
    __device__ __forceinline__ Tile take() {
        const int lane = __ffs(left) - 1;
        const Tile tile = {
            from - lane, (hidden >> lane & 1) != 0, (of_one_id >> lane & 1) != 0};
        left &= left - 1;
        look_further();
        return tile;
    }
};

// The same by a whole warp: the listed tiles, or one if there are none, all hidden.
__device__ __forceinline__ void load_listed_keys(const Arguments& arguments, SharedPlan& shared) {
    const Shape& shape = arguments.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const Mask<CAUSAL, WINDOW> mask = mask_of(arguments, OwnSequence{});
    const int lane = threadIdx.x % 32;
    Tiles tiles(arguments);
    PipelineState<KV_STAGES> ring;
    for (;;) {
        const Queries queries = tiles.told(arguments, shared).queries;
        if (queries.num_rows == 0) return;
        const int head = queries.head / group_size;
        const Pairs pairs(arguments, queries.batch);
        ListedTiles<Pairs> listed(
            pairs, queries.first / BLOCK_Q,
            mask.key_tiles(queries.first, queries.num_rows, BLOCK_K));
        ListedTiles<Pairs>::Tile tile = {0, true, false};
        LaneIds ids;
        const auto look_at_next = [&] {
            if (listed.has_more()) tile = listed.take();
            if (tile.hides) ids.load(pairs, tile.number * BLOCK_K, shape.seqlen_k);
            if (DYNAMIC_SCHEDULER && !listed.has_more() && lane == 0) shared.work.ask();
        };
        look_at_next();
        for (bool last = false; !last; ring.next()) {
            last = !listed.has_more();
            const int k_start = tile.number * BLOCK_K;
            mbarrier_wait(shared_address(&shared.k_empty[ring.index]), ring.phase ^ 1);
            if (tile.hides) ids.store(shared.beside.ids(ring));
            __syncwarp();                                   // before lane 0 says that it is done
            if (lane == 0) {
                shared.beside.words[ring.index] =
                    tile.number << TILE_SHIFT | (last ? LAST_BIT : 0)
                    | (tile.hides ? HIDDEN_BIT : 0) | (tile.has_one_id ? ONE_ID_BIT : 0);
                tma_load_tile<BLOCK_K, HEAD_DIM>(
                    shared_address(&shared.k[ring.index]), arguments.k_map,
                    shared_address(&shared.k_full[ring.index]), k_start, head, queries.batch);
            }
            // What the next tile needs is read before anyone waits for V's place.
            if (!last) look_at_next();
            if (lane == 0) {
                mbarrier_wait(shared_address(&shared.v_empty[ring.index]), ring.phase ^ 1);
                tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                    shared_address(&shared.v[ring.index]), arguments.v_map,
                    shared_address(&shared.v_full[ring.index]), k_start, head, queries.batch);
            }
            __syncwarp();
        }
    }
}
