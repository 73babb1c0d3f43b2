// Producer warpgroup of forward_sm90.cu: a part's tiles of K and V, by cp.async, which reads rows
// of pages as well as those of one array.
//
// A stage is full when the copies of all threads are complete: nobody waits for them but the
// consumers, so the copies of all free stages are under way at once.
#pragma once
#include "decode/key_rows.cuh"
#include "decode/sm90_shared.cuh"

// A thread's chunks of a tile: rows thread / 8 + 16 i, the chunk thread % 8 of each panel.
constexpr int ROWS_AT_ONCE = WARPGROUP / 8, ROWS_OF_THREAD = BLOCK_K / ROWS_AT_ONCE;
static_assert(BLOCK_K % ROWS_AT_ONCE == 0, "all threads load as many rows");

class KeyProducer {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    PipelineState<KV_STAGES> stage;

public:
    __device__ __forceinline__ KeyProducer(const Arguments& args, SharedPlan& shared)
        : args(args), shared(shared) {}

    // All tiles of a part.
    __device__ __forceinline__ void load_part(const Part& part) {
        const RowTile rows(args, part);
        const Mask<CAUSAL, WINDOW> mask = mask_of(args, part.sequence);
        const VisitedTiles tiles =
            rows.visited(rows.user_mask(args), rows.key_tiles(mask, part));
        const Pages<Arguments> pages{args, part.sequence.number};
        const ForwardArguments& arrays = args.arrays;
        const KeyRows k_rows(args, arrays.k, arrays.k_stride, part.sequence, part.kv_head);
        const KeyRows v_rows(args, arrays.v, arrays.v_stride, part.sequence, part.kv_head);
        int page_of[ROWS_OF_THREAD] = {};
        for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
            const int first_key = tile * BLOCK_K, num_keys = part.sequence.seqlen_k - first_key;
            look_up_pages(page_of, pages, first_key, num_keys);
            mbarrier_wait(barrier_at(shared.k_empty, stage.index), stage.phase ^ 1);
            load<HEAD_DIM>(shared_address(&shared.k[stage.index]), k_rows, first_key, num_keys,
                           arrays.shape.head_dim, page_of);
            cp_async_mbarrier_arrive(barrier_at(shared.k_full, stage.index));
            mbarrier_wait(barrier_at(shared.v_empty, stage.index), stage.phase ^ 1);
            load<HEAD_DIM_V>(shared_address(&shared.v[stage.index]), v_rows, first_key, num_keys,
                             arrays.shape.head_dim_v, page_of);
            if (rows.is_masked(mask, tiles, tile, first_key, BLOCK_K)) replace_nonfinite();
            else cp_async_mbarrier_arrive(barrier_at(shared.v_full, stage.index));
        }
    }

private:
    // The page of each of the thread's keys, -1 if it is invalid or past the last key.
    static __device__ __forceinline__ void look_up_pages(
        int (&page_of)[ROWS_OF_THREAD], const Pages<Arguments>& pages, int first_key,
        int num_keys) {
        if constexpr (PAGED)
            #pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; ++i) {
                const int row = threadIdx.x / 8 + i * ROWS_AT_ONCE;
                page_of[i] = row < num_keys ? pages.of_key(first_key + row) : -1;
            }
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
    }

    // In a partly masked tile, replaces each NaN and infinity of V by 0: it must not reach rows
    // that do not see its key. The consumers add them, pair by pair. The fence orders this thread's
    // stores before the reads of wgmma. Its copies are complete by then; and it is mbarrier.arrive
    // that releases its stores, not cp.async.mbarrier.arrive.
    __device__ __forceinline__ void replace_nonfinite() {
        cp_async_commit();
        cp_async_wait<0>();
        const bool found = replace_in_tile(shared_address(&shared.v[stage.index]));
        const u32 of_warp = __ballot_sync(WHOLE_WARP, found);
        if (lane == 0) shared.replaced[stage.index][warp] = of_warp;
        fence_async_proxy();
        mbarrier_arrive(barrier_at(shared.v_full, stage.index));
    }
    // Of this thread's chunks. True if there were any.
    __device__ __forceinline__ bool replace_in_tile(u32 tile) {
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
