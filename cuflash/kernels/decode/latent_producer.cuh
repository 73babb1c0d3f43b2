// Producer warpgroup of forward_latent.cu: finds the block's parts, and loads their key tiles by
// cp.async, which reads rows of pages as well as those of one array.
//
// A panel of a tile is one cp.async group of each thread. All panels of a tile are published, in
// order, as they arrive, before the producer waits for the stage of the next one: the consumers
// then have a whole tile to work on.
#pragma once
#include "decode/key_rows.cuh"
#include "decode/latent_shared.cuh"

// A thread's chunks of a panel: rows thread / 8 + 16 i, the chunk thread % 8.
constexpr int ROWS_AT_ONCE = WARPGROUP / 8, ROWS_OF_THREAD = BLOCK_K / ROWS_AT_ONCE;

class LatentProducer {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    PipelineState<KV_STAGES> next;
    PipelineState<WORKS> work;
    bool has_pending = false;                               // the tile before `next`

public:
    __device__ __forceinline__ LatentProducer(const Arguments& args, SharedPlan& shared)
        : args(args), shared(shared) {}

    __device__ __forceinline__ void run() {
        Parts parts(args);
        Part part;
        while (parts.next(part)) {
            const RowTile rows(args, part);
            const Mask<CAUSAL, WINDOW> mask = mask_of(args, part.sequence);
            const TileRange tiles =
                rows.unhidden(rows.user_mask(args), rows.key_tiles(mask, part));
            publish_pending();
            publish_work({part, tiles});
            load_part(part, tiles);
        }
        publish_pending();
        part.count = 0;
        publish_work({part, {0, 0}});
    }

private:
    __device__ __forceinline__ void publish_work(const Work& found) {
        if (warp == 0) {
            mbarrier_wait(barrier_at(shared.work_empty, work.index), work.phase ^ 1);
            if (lane == 0) {
                shared.works[work.index] = found;
                mbarrier_arrive(barrier_at(shared.work_full, work.index));
            }
            __syncwarp();
        }
        work.next();
    }

    __device__ __forceinline__ void load_part(const Part& part, TileRange tiles) {
        const Pages<Arguments> pages{args, part.sequence.number};
        const ForwardArguments& arrays = args.arrays;
        const KeyRows rows(args, arrays.k, arrays.k_stride, part.sequence, part.kv_head);
        for (int tile = tiles.first; tile < tiles.end; ++tile, next.next()) {
            // The rows' addresses; null past the last key, and on invalid pages.
            const unsigned char* sources[ROWS_OF_THREAD];
            #pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; ++i) {
                const int key = tile * BLOCK_K + thread / 8 + i * ROWS_AT_ONCE;
                const int page = key < part.sequence.seqlen_k ? pages.of_key(key) : -1;
                sources[i] = page < 0 ? nullptr : rows.row(page, key);
            }
            publish_pending();
            load_tile(sources, rows.first);
            has_pending = true;
        }
    }

    // Starts the copies of a tile. Rows without an address, and columns past the head dimension,
    // become 0. `any`: an address of the array.
    __device__ __forceinline__ void load_tile(
        const unsigned char* const (&sources)[ROWS_OF_THREAD], const unsigned char* any) {
        const int first_column = thread % 8 * CHUNK_ELEMENTS;
        const u32 target = shared_address(&shared.stages[next.index].k)
                         + tile_offset<BLOCK_K>(thread / 8, first_column);
        #pragma unroll
        for (int n = 0; n < PANELS; ++n) {
            const int panel = panel_at(n), column = panel * PANEL_COLUMNS + first_column;
            const int columns = args.arrays.shape.head_dim - column;
            mbarrier_wait(barrier_at(shared.empty, next.index * PANELS + panel), next.phase ^ 1);
            #pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; ++i) {
                const bool exists = sources[i] != nullptr;
                const int bytes = exists ? min(max(columns, 0), CHUNK_ELEMENTS) * 2 : 0;
                cp_async_16_partly(
                    target + panel * PANEL_BYTES + i * ROWS_AT_ONCE * PANEL_ROW_BYTES,
                    bytes > 0 ? sources[i] + column * 2 : any, bytes);
            }
            cp_async_commit();
        }
    }

    // The panels of the tile before, as they arrive. The fence orders this thread's copies, by the
    // generic proxy, before the reads of wgmma, by the asynchronous one.
    __device__ __forceinline__ void publish_pending() {
        if (!has_pending) return;
        has_pending = false;
        publish_from<0>(next.previous());
    }
    template <int N> __device__ __forceinline__ void publish_from(int stage) {
        cp_async_wait<PANELS - 1 - N>();
        fence_async_proxy();
        __syncwarp();
        mbarrier_arrive_if(lane == 0, barrier_at(shared.full, stage * PANELS + panel_at(N)));
        if constexpr (N + 1 < PANELS) publish_from<N + 1>(stage);
    }
};
