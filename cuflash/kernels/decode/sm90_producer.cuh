// Producer warpgroup of forward_sm90.cu: a part's tiles of K and V, by cp.async, which reads rows
// of pages as well as those of one array.
//
// Each tile of K or V is one cp.async group of each thread; it is published once the group is
// complete, in order. Before the producer waits for a stage, it publishes all tiles of K and V but
// the last LAG, which are under way: while the consumers work on the tile whose stage it waits for,
// they have the next one.
#pragma once
#include "decode/key_rows.cuh"
#include "decode/sm90_shared.cuh"

// A thread's chunks of a tile: rows thread / 8 + 16 i, the chunk thread % 8 of each panel.
constexpr int ROWS_AT_ONCE = WARPGROUP / 8, ROWS_OF_THREAD = BLOCK_K / ROWS_AT_ONCE;
static_assert(BLOCK_K % ROWS_AT_ONCE == 0, "all threads load as many rows");

constexpr int LAG = KV_STAGES - 2;

class KeyProducer {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    PipelineState<KV_STAGES> next, oldest;                  // stages to load, and to publish
    int pending = 0;                                        // groups under way
    bool oldest_is_v = false;
    int oldest_tile = 0;

public:
    __device__ __forceinline__ KeyProducer(const Arguments& args, SharedPlan& shared)
        : args(args), shared(shared) {}

    // All tiles of a part.
    __device__ __forceinline__ void load_part(const Part& part) {
        const RowTile rows(args, part);
        const Mask<CAUSAL, WINDOW> mask = mask_of(args, part.sequence);
        const auto user_mask = rows.user_mask(args);
        const TileRange tiles = rows.unhidden(user_mask, rows.key_tiles(mask, part));
        const Pages<Arguments> pages{args, part.sequence.number};
        const ForwardArguments& arrays = args.arrays;
        const KeyRows k(args, arrays.k, arrays.k_stride, part.sequence, part.kv_head);
        const KeyRows v(args, arrays.v, arrays.v_stride, part.sequence, part.kv_head);
        const auto is_masked = [&](int tile) {
            return rows.masks(mask, user_mask, tile * BLOCK_K, BLOCK_K);
        };
        oldest_tile = tiles.first;
        for (int tile = tiles.first; tile < tiles.end; ++tile, next.next()) {
            const int first_key = tile * BLOCK_K, num_keys = part.sequence.seqlen_k - first_key;
            int page_of[ROWS_OF_THREAD] = {};
            if constexpr (PAGED)
                #pragma unroll
                for (int i = 0; i < ROWS_OF_THREAD; ++i) {
                    const int row = thread / 8 + i * ROWS_AT_ONCE;
                    page_of[i] = row < num_keys ? pages.of_key(first_key + row) : -1;
                }
            acquire<2 * LAG>(barrier_at(shared.k_empty, next.index), is_masked);
            load<HEAD_DIM>(shared_address(&shared.k[next.index]), k, first_key, num_keys,
                           arrays.shape.head_dim, page_of);
            acquire<2 * LAG + 1>(barrier_at(shared.v_empty, next.index), is_masked);
            load<HEAD_DIM_V>(shared_address(&shared.v[next.index]), v, first_key, num_keys,
                             arrays.shape.head_dim_v, page_of);
        }
        while (pending > 0) publish<0>(is_masked);
    }

private:
    // Waits until a stage's consumers have released it, with at most LEFT groups under way.
    template <int LEFT, class IsMasked>
    __device__ __forceinline__ void acquire(u32 empty, IsMasked is_masked) {
        while (pending > LEFT) publish<LEFT>(is_masked);
        mbarrier_wait(empty, next.phase ^ 1);
    }

    // Starts the copy of a tile. Keys past the last, on invalid pages, and columns past the head
    // dimension become 0.
    template <int COLUMNS>
    __device__ __forceinline__ void load(
        u32 tile, const KeyRows& rows, int first_key, int num_keys, int num_columns,
        const int (&page_of)[ROWS_OF_THREAD]) {
        const int first_row = thread / 8, first_column = thread % 8 * CHUNK_ELEMENTS;
        const u32 target = tile + tile_offset<BLOCK_K>(first_row, first_column);
        const bool is_whole = num_keys >= BLOCK_K && num_columns == COLUMNS;
        const unsigned char* source = rows.row(0, first_key + first_row);
        #pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; ++i) {
            const int row = first_row + i * ROWS_AT_ONCE;
            if constexpr (PAGED) source = rows.row(max(page_of[i], 0), first_key + row);
            #pragma unroll
            for (int panel = 0; panel < num_panels(COLUMNS); ++panel) {
                const int column = first_column + panel * PANEL_COLUMNS;
                if (COLUMNS % PANEL_COLUMNS != 0 && column >= COLUMNS) break;
                const u32 chunk = target + (panel * BLOCK_K + i * ROWS_AT_ONCE) * PANEL_ROW_BYTES;
                if (!PAGED && is_whole) {
                    cp_async_16(chunk, source + column * 2);
                } else {
                    const bool exists = row < num_keys && page_of[i] >= 0;
                    const int columns = exists ? num_columns - column : 0;
                    const int bytes = min(max(columns, 0), CHUNK_ELEMENTS) * 2;
                    cp_async_16_partly(chunk, bytes > 0 ? source + column * 2 : rows.first, bytes);
                }
            }
            source += ROWS_AT_ONCE * rows.token_bytes;
        }
        cp_async_commit();
        ++pending;
    }

    // The oldest tile, to the consumers; of the newer ones, LEFT groups may be under way. The fence
    // orders this thread's copies, by the generic proxy, before the reads of wgmma, by the
    // asynchronous one.
    template <int LEFT, class IsMasked>
    __device__ __forceinline__ void publish(IsMasked is_masked) {
        cp_async_wait<LEFT>();
        --pending;
        const int stage = oldest.index;
        if (oldest_is_v && is_masked(oldest_tile)) {
            const bool found = replace_nonfinite(shared_address(&shared.v[stage]));
            const u32 of_warp = __ballot_sync(WHOLE_WARP, found);
            if (lane == 0) shared.replaced[stage][warp] = of_warp;
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(oldest_is_v ? barrier_at(shared.v_full, stage)
                                        : barrier_at(shared.k_full, stage));
        if (oldest_is_v) {
            oldest.next();
            ++oldest_tile;
        }
        oldest_is_v = !oldest_is_v;
    }

    // Replaces each NaN and infinity among this thread's chunks of V by 0: it must not reach rows
    // that do not see its key. The consumers add them, pair by pair. True if there were any.
    __device__ __forceinline__ bool replace_nonfinite(u32 tile) {
        bool found = false;
        #pragma unroll 1
        for (int i = 0; i < ROWS_OF_THREAD * num_panels(HEAD_DIM_V); ++i) {
            const int row = thread / 8 + i % ROWS_OF_THREAD * ROWS_AT_ONCE;
            const int column = i / ROWS_OF_THREAD * PANEL_COLUMNS + thread % 8 * CHUNK_ELEMENTS;
            if (HEAD_DIM_V % PANEL_COLUMNS != 0 && column >= HEAD_DIM_V) continue;
            const u32 chunk = tile + tile_offset<BLOCK_K>(row, column);
            const uint4 x = load_shared_16(chunk);
            const u32 words[4] = {x.x, x.y, x.z, x.w};
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 signs = nonfinite_bits<Element>(words[j]);
                if (signs == 0) continue;
                store_shared(chunk + j * 4, words[j] & ~((signs >> 15) * 0xFFFFu));
                found = true;
            }
        }
        return found;
    }
};
