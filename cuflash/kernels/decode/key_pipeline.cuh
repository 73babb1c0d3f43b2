// decode/forward.cu's loads: a warp's keys of one tile after another.
#pragma once
#include "decode/float8.cuh"
#include "decode/rows.cuh"

// A lane's chunks of a tile of the warp's keys that exists as a whole, COLUMNS numbers of 16 bits:
// each ROWS rows after the one before, then each panel. POSSIBLE: all lanes have as many, and the
// swizzle of a lane's chunks does not change, or only its bit 2.
template <int COLUMNS> struct LaneChunks {
    static constexpr int OF_ROW = COLUMNS < PANEL_COLUMNS ? COLUMNS / CHUNK_ELEMENTS : 8;
    static constexpr int ROWS = 32 / OF_ROW;
    static constexpr bool POSSIBLE = 8 % OF_ROW == 0
                                  && (COLUMNS < PANEL_COLUMNS || COLUMNS % PANEL_COLUMNS == 0);

    // Starts the copy from rows `token_bytes` apart.
    static __device__ __forceinline__ void load(
        u32 tile, const unsigned char* first, i64 token_bytes) {
        const int lane = threadIdx.x % 32, row = lane / OF_ROW;
        const int column = lane % OF_ROW * CHUNK_ELEMENTS;
        const unsigned char* source = first + row * token_bytes + column * 2;
        u32 targets[2] = {tile + tile_offset<WARP_KEYS>(row, column),
                          tile + tile_offset<WARP_KEYS>(row + ROWS % 8, column)};
        if constexpr (ROWS % 8 == 0) targets[1] += ROWS * PANEL_ROW_BYTES;
        #pragma unroll
        for (int i = 0; i < WARP_KEYS / ROWS; ++i) {
            #pragma unroll
            for (int panel = 0; panel < num_panels(COLUMNS); ++panel)
                cp_async_16(targets[i % 2] + (i / 2 * 2 * ROWS + panel * WARP_KEYS)
                                             * PANEL_ROW_BYTES,
                            source + panel * PANEL_ROW_BYTES);
            source += ROWS * token_bytes;
        }
    }
};

// Each tile of the warp's keys is one cp.async group. With one stage a tile loads when its turn
// comes, as where copies are complete at once (sm_75); the next tile's page is known before.
struct KeyPipeline {
    const Arguments& args;
    SharedPlan& shared;
    Pages<Arguments> pages;
    KeyRows k, v;
    int kv_head, seqlen_k, warp, end_tile, next_tile;
    int next_page = 0;                                      // of the next tile, if it has one
    int next_stage = 0, stage = 0;

    // Whether a warp's keys of a tile are always on one page.
    static constexpr bool ONE_PAGE = PAGE_SIZE % WARP_KEYS == 0;

    __device__ __forceinline__ KeyPipeline(
        const Arguments& args, SharedPlan& shared, const Part& part, TileRange tiles)
        : args(args), shared(shared), pages{args, part.sequence.number},
          k(args, args.arrays.k, args.arrays.k_stride, part.sequence, part.kv_head),
          v(args, args.arrays.v, args.arrays.v_stride, part.sequence, part.kv_head),
          kv_head(part.kv_head),
          seqlen_k(part.sequence.seqlen_k), warp(threadIdx.x / 32), end_tile(tiles.end),
          next_tile(tiles.first) {
        look_up_page();
    }

    // Before the first load: to the tiles that the user's mask leaves.
    __device__ __forceinline__ void restrict_to(TileRange tiles) {
        if constexpr (HIDES_BY_INTERVALS) {
            end_tile = tiles.end;
            if (tiles.first == next_tile) return;
            next_tile = tiles.first;
            look_up_page();
        }
    }
    __device__ __forceinline__ void load_next() {
        if (next_tile < end_tile) {
            load_keys<HEAD_DIM>(shared_address(&shared.tiles.k[warp][next_stage]), k,
                                args.arrays.shape.head_dim);
            load_keys<HEAD_DIM_V>(shared_address(&shared.tiles.v[warp][next_stage]), v,
                                  args.arrays.shape.head_dim_v);
            if constexpr (SCALES == SCALES_OF_PAGES) load_scales(args, shared.tiles);
        }
        cp_async_commit();                                  // an empty group past the last tile
        ++next_tile;
        look_up_page();
        next_stage = next_stage + 1 == NUM_STAGES ? 0 : next_stage + 1;
    }
    // Waits for the oldest tile.
    __device__ __forceinline__ void wait() const {
        cp_async_wait<(NUM_STAGES > 1 ? NUM_STAGES - 2 : 0)>();
        __syncwarp();
    }
    // The oldest tile's stage may be loaded again.
    __device__ __forceinline__ void release() {
        __syncwarp();
        stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
    }
    // The oldest tile's keys, and its values.
    __device__ __forceinline__ u32 k_smem() const {
        return shared_address(&shared.tiles.k[warp][stage]);
    }
    __device__ __forceinline__ u32 v_smem() const {
        return shared_address(&shared.tiles.v[warp][stage]);
    }

    // Multiplies each score by the scale of its key.
    template <class Tiles>
    __device__ __forceinline__ void apply_k_scales(Scores& s, Tiles& tiles, float of_head) const {
        if constexpr (SCALES == SCALES_OF_HEADS)
            for_each_key(s, [&](float& x, int) { x *= of_head; });
        if constexpr (SCALES == SCALES_OF_PAGES)
            for_each_key(s, [&](float& x, int key) { x *= tiles.scales[warp][stage][0][key]; });
    }
    // Multiplies each weight by WEIGHT_FACTOR, and by its page's scale. A head's scale multiplies O
    // at the end.
    template <class Tiles>
    __device__ __forceinline__ void apply_v_scales(Scores& p, Tiles& tiles) const {
        if constexpr (SCALES == SCALES_OF_HEADS)
            for_each_key(p, [&](float& x, int) { x *= WEIGHT_FACTOR; });
        if constexpr (SCALES == SCALES_OF_PAGES)
            for_each_key(p, [&](float& x, int key) {
                x *= tiles.scales[warp][stage][1][key] * WEIGHT_FACTOR;
            });
    }

private:
    __device__ __forceinline__ int first_key() const {
        return next_tile * BLOCK_K + warp * WARP_KEYS;
    }
    // Starts the copy of the scales of the keys' pages, a lane each; 0 past the last key.
    template <class Arguments, class Tiles>
    __device__ __forceinline__ void load_scales(const Arguments& args, Tiles& tiles) {
        const int lane = threadIdx.x % 32, key = first_key() + lane % WARP_KEYS;
        const bool of_k = lane < WARP_KEYS;
        const int page = key < seqlen_k ? pages.of_key(key) : -1;
        const HeadStrides stride = of_k ? args.cache.k_scale_stride : args.cache.v_scale_stride;
        const float* scales = of_k ? args.k_scale : args.v_scale;
        cp_async_4(shared_address(&tiles.scales[warp][next_stage][!of_k][lane % WARP_KEYS]),
                   scales + max(page, 0) * stride.batch + kv_head * stride.head,
                   page >= 0 ? 4 : 0);
    }
    // Long before it is needed.
    __device__ __forceinline__ void look_up_page() {
        if constexpr (ONE_PAGE)
            if (next_tile < end_tile && first_key() < seqlen_k)
                next_page = pages.of_key(first_key());
    }
    // Keys past the last and columns past the head dimension become 0.
    template <int COLUMNS>
    __device__ __forceinline__ void load_keys(u32 tile, const KeyRows& rows, int num_columns) {
        constexpr bool LOOKS_UP = PAGED && !ONE_PAGE;       // each key's page
        constexpr int WIDTH = COLUMNS * static_cast<int>(sizeof(Cached)) / 2;
        using Chunks = LaneChunks<WIDTH>;
        const int row_bytes = num_columns * static_cast<int>(sizeof(Cached));
        const unsigned char* first = rows.row(next_page, first_key());
        if constexpr (Chunks::POSSIBLE && !LOOKS_UP)
            if (first_key() + WARP_KEYS <= seqlen_k && row_bytes == WIDTH * 2 && next_page >= 0)
                return Chunks::load(tile, first, rows.token_bytes);
        const auto load_chunk = [&](int row, int column) {
            const int key = first_key() + row;
            int bytes = key < seqlen_k ? min(max(row_bytes - column * 2, 0), CHUNK_BYTES) : 0;
            const unsigned char* source = first + row * rows.token_bytes;
            if constexpr (LOOKS_UP) {
                const int page = bytes > 0 ? pages.of_key(key) : -1;
                source = rows.row(page, key);
                if (page < 0) bytes = 0;
            } else if (PAGED && next_page < 0) {
                bytes = 0;
            }
            cp_async_16_partly(tile + tile_offset<WARP_KEYS>(row, column),
                               bytes > 0 ? source + column * 2 : rows.first, bytes);
        };
        if constexpr (IS_FLOAT8) for_each_float8_chunk<WARP_KEYS, COLUMNS>(load_chunk);
        else for_each_chunk<WARP_KEYS, COLUMNS, 32>(threadIdx.x % 32, load_chunk);
    }
};
