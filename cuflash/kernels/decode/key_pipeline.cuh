// decode/forward.cu's loads: a warp's keys of one tile after another.
//
// Constants: NUM_STAGES, HEAD_DIM, HEAD_DIM_V; those of key_rows.cuh.
#pragma once
#include "decode/float8.cuh"
#include "decode/rows.cuh"

// Each tile of the warp's keys is one cp.async group.
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
        cp_async_wait<NUM_STAGES - 2>();
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

    // If pages have scales, multiplies each score by its key's: K's if OF is 0, V's if it is 1.
    template <int OF, class Tiles>
    __device__ __forceinline__ void apply_page_scales(Scores& s, Tiles& tiles) const {
        if constexpr (SCALES == SCALES_OF_PAGES) {
            constexpr float FACTOR = OF == 0 ? 1.0f : WEIGHT_FACTOR;
            const auto& scales = tiles.scales[warp][stage][OF];
            for_each_key(s, [&](float& x, int key) { x *= scales[key] * FACTOR; });
        }
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
        const int row_bytes = num_columns * static_cast<int>(sizeof(Cached));
        const unsigned char* first = rows.row(next_page, first_key());
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
