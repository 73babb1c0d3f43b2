// Producer warpgroup of forward_latent.cu: finds the block's parts, and loads their key tiles by
// cp.async, which reads rows of pages as well as those of one array.
//
// Two warps load every other tile, as the thread that has started copies has to wait for them: so
// the loads of one tile are under way while those of the next one start. A panel of a tile is one
// cp.async group of each thread. All panels of a tile are published, in order, as they arrive,
// before its warps wait for the stage of their next tile.
#pragma once
#include "decode/key_rows.cuh"
#include "decode/latent_shared.cuh"

// Panels that are published together: a fence takes long.
constexpr int PANELS_AT_ONCE = 3;

// A thread's chunks of a panel: rows thread / 8 + 8 i, the chunk thread % 8.
constexpr int TILE_THREADS = TILE_WARPS * 32;
constexpr int ROWS_AT_ONCE = TILE_THREADS / 8, ROWS_OF_THREAD = BLOCK_K / ROWS_AT_ONCE;

// The addresses of the thread's rows of a tile; null past the last key, and on invalid pages. All
// keys of a tile are rows of one page, or of no page.
template <bool ONE_PAGE> struct TileRows {
    const unsigned char* first;
    i64 step;
    int count;
    __device__ __forceinline__ TileRows(
        const Pages<Arguments>& pages, const KeyRows& rows, int first_key, int thread_row,
        int seqlen_k)
        : step(ROWS_AT_ONCE * rows.token_bytes) {
        const int page = pages.of_key(first_key);
        first = rows.row(max(page, 0), first_key + thread_row);
        const int after = seqlen_k - first_key - thread_row + ROWS_AT_ONCE - 1;
        count = page < 0 ? 0 : after / ROWS_AT_ONCE;
    }
    __device__ __forceinline__ const unsigned char* operator[](int i) const {
        return i < count ? first + i * step : nullptr;
    }
    __device__ __forceinline__ bool all_exist() const { return count >= ROWS_OF_THREAD; }
};
template <> struct TileRows<false> {
    const unsigned char* each[ROWS_OF_THREAD];
    __device__ __forceinline__ TileRows(
        const Pages<Arguments>& pages, const KeyRows& rows, int first_key, int thread_row,
        int seqlen_k) {
        #pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; ++i) {
            const int key = first_key + thread_row + i * ROWS_AT_ONCE;
            const int page = key < seqlen_k ? pages.of_key(key) : -1;
            each[i] = page < 0 ? nullptr : rows.row(page, key);
        }
    }
    __device__ __forceinline__ const unsigned char* operator[](int i) const { return each[i]; }
    __device__ __forceinline__ bool all_exist() const {
        bool all = true;
        #pragma unroll
        for (const unsigned char* row : each) all &= row != nullptr;
        return all;
    }
};

class LatentProducer {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % TILE_THREADS, lane = thread % 32;
    const bool is_first_warp = threadIdx.x < 32;
    PipelineState<KV_STAGES> next;
    PipelineState<WORKS> work;
    bool is_turn = threadIdx.x < TILE_THREADS;              // the warp has the next tile
    int pending = -1;                                       // the stage of its last one, or none

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
                rows.visited(rows.user_mask(args), rows.key_tiles(mask, part));
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
        if (is_first_warp) {
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
            const bool is_own = is_turn;
            is_turn = !is_turn;
            if (!is_own) continue;
            const TileRows<PAGE_SIZE % BLOCK_K == 0> sources(
                pages, rows, tile * BLOCK_K, thread / 8, part.sequence.seqlen_k);
            publish_pending();
            load_tile(sources, rows.first);
            pending = next.index;
        }
    }

    // Starts the copies of a tile. Rows without an address, and columns past the head dimension,
    // become 0. `any`: an address of the array.
    template <class Rows>
    __device__ __forceinline__ void load_tile(const Rows& sources, const unsigned char* any) {
        const int first_column = thread % 8 * CHUNK_ELEMENTS;
        const int head_dim = args.arrays.shape.head_dim;
        const bool is_whole = head_dim == HEAD_DIM && sources.all_exist();
        if (__ballot_sync(WHOLE_WARP, is_whole) == WHOLE_WARP) {
            const unsigned char* rows[ROWS_OF_THREAD];
            #pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; ++i) rows[i] = sources[i] + first_column * 2;
            load_panels([&](u32 target, int i, int panel) {
                cp_async_16(target, rows[i] + panel * PANEL_ROW_BYTES);
            });
        } else {
            load_panels([&](u32 target, int i, int panel) {
                const unsigned char* source = sources[i];
                const int column = panel * PANEL_COLUMNS + first_column;
                const int columns = source == nullptr ? 0 : head_dim - column;
                const int bytes = min(max(columns, 0), CHUNK_ELEMENTS) * 2;
                cp_async_16_partly(target, bytes > 0 ? source + column * 2 : any, bytes);
            });
        }
    }
    // Calls load(target, i, panel) for the thread's chunk of its i-th row of each panel.
    template <class Load> __device__ __forceinline__ void load_panels(Load load) {
        const u32 tile = shared_address(&shared.stages[next.index].k)
                       + tile_offset<BLOCK_K>(thread / 8, thread % 8 * CHUNK_ELEMENTS);
        #pragma unroll
        for (int n = 0; n < PANELS; ++n) {
            const int panel = panel_at(n);
            mbarrier_wait(barrier_at(shared.empty, next.index * PANELS + panel), next.phase ^ 1);
            #pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; ++i)
                load(tile + panel * PANEL_BYTES + i * ROWS_AT_ONCE * PANEL_ROW_BYTES, i, panel);
            cp_async_commit();
        }
    }

    // The panels of the warp's last tile, as they arrive. The fence orders this thread's copies, by
    // the generic proxy, before the reads of wgmma, by the asynchronous one.
    __device__ __forceinline__ void publish_pending() {
        if (pending >= 0) publish_from<0>(pending);
        pending = -1;
    }
    template <int N> __device__ __forceinline__ void publish_from(int stage) {
        constexpr int END = N + PANELS_AT_ONCE < PANELS ? N + PANELS_AT_ONCE : PANELS;
        cp_async_wait<PANELS - END>();
        fence_async_proxy();
        __syncwarp();
        mbarrier_arrive_if(lane < END - N,
                           barrier_at(shared.full, stage * PANELS + panel_at(N + lane)));
        if constexpr (END < PANELS) publish_from<END>(stage);
    }
};
