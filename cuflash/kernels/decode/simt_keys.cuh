// decode/forward_simt.cu's loads: a warp's keys of a tile, from global memory to registers.
//
// The lanes share the columns of a row: lane l has the chunks l, l + 32, l + 64, ... of VECTOR
// neighbours. Columns past the head dimension are 0.
#pragma once
#include "common/elements.cuh"
#include "common/float8.cuh"
#include "decode/key_rows.cuh"
#include "decode/parts.cuh"

using Real = Accumulator<Element>;

static_assert(WARP_KEYS <= 32, "a lane has a key's page");
static_assert(BLOCK_K == NUM_WARPS * WARP_KEYS, "each warp takes as many keys of a tile");

// A type of at most 4 bytes, of which a chunk of BYTES consists.
template <int BYTES> struct UnitOf { using type = u32; };
template <> struct UnitOf<2> { using type = u16; };
template <> struct UnitOf<1> { using type = u8; };
template <class, int BYTES> struct UnitOfChunk : UnitOf<BYTES> {};
template <int BYTES> struct UnitOfChunk<float, BYTES> { using type = float; };
template <int BYTES> struct UnitOfChunk<double, BYTES> { using type = double; };

// The i-th of the elements in a unit.
template <class Stored, class Unit>
__device__ __forceinline__ Real element_of(Unit unit, int i) {
    if constexpr (sizeof(Stored) == 1)
        return float8_to_float(static_cast<u32>(unit) << (24 - i * 8));
    else if constexpr (sizeof(Stored) == 2)
        return to_accumulator(Stored{static_cast<u16>(unit >> i * 16)});
    else
        return to_accumulator(unit);
}

// Neighbours of a row as they are stored, loaded at once.
template <int VECTOR> struct alignas(VECTOR * sizeof(Cached)) Chunk {
    using Unit = typename UnitOfChunk<Cached, VECTOR * sizeof(Cached)>::type;
    static constexpr int OF_UNIT = sizeof(Unit) / sizeof(Cached);
    Unit units[VECTOR / OF_UNIT];

    __device__ __forceinline__ Real element(int i) const {
        return element_of<Cached>(units[i / OF_UNIT], i % OF_UNIT);
    }
};

// A lane's columns of a row of K or V.
template <int COLUMNS, int VECTOR> struct LaneColumns {
    static_assert(COLUMNS % (32 * VECTOR) == 0, "each lane has as many chunks");
    static constexpr int COUNT = COLUMNS / 32;
    Chunk<VECTOR> chunks[COUNT / VECTOR];

    static __device__ __forceinline__ int column(int i) {
        return (i / VECTOR * 32 + threadIdx.x % 32) * VECTOR + i % VECTOR;
    }
    // 0 without a row.
    __device__ __forceinline__ void load(
        const unsigned char* row, bool has_row, int num_columns) {
        #pragma unroll
        for (int c = 0; c < COUNT / VECTOR; ++c) {
            const int first = column(c * VECTOR);
            chunks[c] = {};
            if (has_row && first < num_columns)
                chunks[c] = reinterpret_cast<const Chunk<VECTOR>*>(row)[first / VECTOR];
        }
    }
    __device__ __forceinline__ Real operator[](int i) const {
        return chunks[i / VECTOR].element(i % VECTOR);
    }
};
using KColumns = LaneColumns<HEAD_DIM, K_VECTOR>;
using VColumns = LaneColumns<HEAD_DIM_V, V_VECTOR>;

// A warp's keys of a tile.
struct WarpKeys {
    KColumns k[WARP_KEYS];
    VColumns v[WARP_KEYS];
    int page;                                               // of key lane % WARP_KEYS, as of V
};

// The page of a warp's key. page: that of key lane % WARP_KEYS.
__device__ __forceinline__ int page_of_key(int page, int key) {
    if constexpr (PAGED) return __shfl_sync(WHOLE_WARP, page, key);
    else return 0;
}

// Loads a warp's keys of one tile after another: K, then V. Pages are looked up one tile ahead.
struct KeyLoads {
    const Pages<Arguments> pages;
    const KeyRows k, v;
    const int end_key, head_dim, head_dim_v;
    int next_page;                                          // as WarpKeys::page

    __device__ __forceinline__ KeyLoads(
        const Arguments& args, const Part& part, TileRange tiles)
        : pages{args, part.sequence.number},
          k(args, args.arrays.k, args.arrays.k_stride, part.sequence, part.kv_head),
          v(args, args.arrays.v, args.arrays.v_stride, part.sequence, part.kv_head),
          end_key(min(part.sequence.seqlen_k, tiles.end * BLOCK_K)),
          head_dim(args.arrays.shape.head_dim), head_dim_v(args.arrays.shape.head_dim_v),
          next_page(page_of_lane(tiles.first)) {}

    static __device__ __forceinline__ int first_key(int tile) {
        return tile * BLOCK_K + threadIdx.x / 32 * WARP_KEYS;
    }
    // K and V are 0 for keys past the last, and for those whose page is invalid.
    __device__ __forceinline__ void load_k(WarpKeys& keys, int tile) const {
        load(keys.k, k, tile, head_dim);
    }
    __device__ __forceinline__ void load_v(WarpKeys& keys, int tile) {
        load(keys.v, v, tile, head_dim_v);
        keys.page = next_page;
        next_page = page_of_lane(tile + 1);
    }

private:
    __device__ __forceinline__ int page_of_lane(int tile) const {
        const int key = first_key(tile) + threadIdx.x % WARP_KEYS;
        return key < end_key ? pages.of_key(key) : -1;
    }
    template <class Columns>
    __device__ __forceinline__ void load(
        Columns (&columns)[WARP_KEYS], const KeyRows& rows, int tile, int num_columns) const {
        #pragma unroll
        for (int j = 0; j < WARP_KEYS; ++j) {
            const int key = first_key(tile) + j, page = page_of_key(next_page, j);
            columns[j].load(rows.row(page, key), key < end_key && page >= 0, num_columns);
        }
    }
};
