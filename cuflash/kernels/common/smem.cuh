// Tiles of 16-bit elements in shared memory: how they are laid out, filled and emptied.
//
// A tile of ROWS x COLUMNS is stored in panels of 64 columns; a panel's row is 128 bytes. The
// 16-byte chunk c of row r is at chunk c ^ (r % 8), so eight rows of one column of chunks are in
// eight different groups of banks, and ldmatrix reads without bank conflicts. (TMA and wgmma call
// this layout 128-byte swizzle.)
#pragma once
#include "common/ptx.cuh"

constexpr int PANEL_COLUMNS = 64, PANEL_ROW_BYTES = 128, CHUNK_BYTES = 16, CHUNK_ELEMENTS = 8;

constexpr int num_panels(int columns) { return (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

template <int ROWS, int COLUMNS> struct alignas(1024) SmemTile {
    static constexpr int PANEL_BYTES = ROWS * PANEL_ROW_BYTES;
    unsigned char bytes[num_panels(COLUMNS) * PANEL_BYTES];
};

// The offset of element (row, column) from the tile's start, in bytes.
template <int ROWS> inline u32 tile_offset(int row, int column) {
    const int chunk = column / CHUNK_ELEMENTS % 8;
    return column / PANEL_COLUMNS * (ROWS * PANEL_ROW_BYTES) + row * PANEL_ROW_BYTES
         + (chunk ^ (row % 8)) * CHUNK_BYTES + column % CHUNK_ELEMENTS * 2;
}

// Distributes the chunks of a tile over THREADS threads, eight threads to a row of a panel, and
// calls f(row, column) with the first column of each chunk of this thread.
template <int ROWS, int COLUMNS, int THREADS, class F>
__device__ __forceinline__ void for_each_chunk(int thread, F f) {
    constexpr int ROWS_AT_ONCE = THREADS / 8;
    #pragma unroll
    for (int panel = 0; panel < num_panels(COLUMNS); ++panel) {
        const int column = panel * PANEL_COLUMNS + thread % 8 * CHUNK_ELEMENTS;
        if (COLUMNS % PANEL_COLUMNS != 0 && column >= COLUMNS) break;
        #pragma unroll
        for (int i = 0; i < (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; ++i) {
            const int row = i * ROWS_AT_ONCE + thread / 8;
            if (ROWS % ROWS_AT_ONCE == 0 || row < ROWS) f(row, column);
        }
    }
}

// Which parts of a tile may be outside the array: rows past its end, columns past its head_dim.
enum class Missing { NOTHING, ROWS, COLUMNS, ROWS_AND_COLUMNS };

// PADDED: the array's head_dim is less than the kernel's. ragged: the tile may reach past the end.
// cp.async takes any number of bytes, so only other copies profit from whole rows.
template <bool PADDED> constexpr Missing missing(bool ragged) {
    if (!ragged) return PADDED ? Missing::COLUMNS : Missing::NOTHING;
    return PADDED || !COPIES_AT_ONCE ? Missing::ROWS_AND_COLUMNS : Missing::ROWS;
}

// How THREADS threads load a tile of ROWS rows: eight threads a row of a panel, all rows of one
// panel at once, or, of few rows, of PANELS panels.
template <int ROWS, int THREADS> struct LoadShare {
    static constexpr int PANELS = THREADS / 8 > ROWS ? THREADS / 8 / ROWS : 1;
    static constexpr int ROWS_AT_ONCE = THREADS / 8 / PANELS;
    static_assert(ROWS_AT_ONCE % 8 == 0, "all rows of a thread are swizzled alike");
    static_assert(ROWS % ROWS_AT_ONCE == 0, "every thread loads as many rows");
    // The calling thread's first row, and panel.
    static __device__ __forceinline__ int row() {
        return PANELS == 1 ? threadIdx.x / 8 : threadIdx.x / 8 % ROWS_AT_ONCE;
    }
    static __device__ __forceinline__ int panel() {
        return PANELS == 1 ? 0 : threadIdx.x / 8 / ROWS_AT_ONCE;
    }
};

// The first element that the calling thread loads of a tile whose first element is source[offset],
// its rows `stride` elements apart. Share: the tile's; by default that of a tile of many rows.
template <class Share = LoadShare<1024, 1024>>
__device__ __forceinline__ const u16* thread_source(const void* source, i64 offset, i64 stride) {
    return static_cast<const u16*>(source) + offset + Share::row() * stride
         + (Share::panel() * PANEL_COLUMNS + threadIdx.x % 8 * CHUNK_ELEMENTS);
}

// Which chunks a loop over a thread's part of a tile copies: all; those of 16 bytes (others become
// zero); those that the array's last columns fill in part.
enum class Chunks { ALL, WHOLE, IN_PART };

template <int ROWS, int COLUMNS, int THREADS, Missing MISSING, Chunks CHUNKS>
__device__ __forceinline__ void load_chunks(
    u32 tile, const u16* from, i64 stride, int num_rows, int num_columns) {
    using Share = LoadShare<ROWS, THREADS>;
    constexpr int ROWS_AT_ONCE = Share::ROWS_AT_ONCE;
    const int thread_row = Share::row();
    const int thread_column = Share::panel() * PANEL_COLUMNS + threadIdx.x % 8 * CHUNK_ELEMENTS;
    const u32 to = tile + tile_offset<ROWS>(thread_row, thread_column);
    #pragma unroll
    for (int row = 0; row < ROWS; row += ROWS_AT_ONCE) {
        #pragma unroll
        for (int panel = 0; panel < num_panels(COLUMNS); panel += Share::PANELS) {
            if (panel + Share::PANELS > num_panels(COLUMNS)
                && panel + Share::panel() >= num_panels(COLUMNS)) break;
            const int column = panel * PANEL_COLUMNS + thread_column;
            if (COLUMNS % PANEL_COLUMNS != 0 && column >= COLUMNS) break;
            int valid = MISSING == Missing::ROWS
                ? CHUNK_BYTES : min(max(num_columns - column, 0), CHUNK_ELEMENTS) * 2;
            if (CHUNKS == Chunks::WHOLE) valid = valid == CHUNK_BYTES ? CHUNK_BYTES : 0;
            if (CHUNKS == Chunks::IN_PART && valid % CHUNK_BYTES == 0) continue;
            const u32 chunk = to + (panel * ROWS + row) * PANEL_ROW_BYTES;
            const u16* source = from + panel * PANEL_COLUMNS;
            if constexpr (MISSING == Missing::NOTHING)
                cp_async_16(chunk, source);
            else if constexpr (MISSING == Missing::COLUMNS)
                cp_async_16_partly(chunk, source, valid);
            else
                cp_async_16_partly(chunk, source, row + thread_row < num_rows ? valid : 0);
        }
        from += ROWS_AT_ONCE * stride;
    }
}

// Starts the copy of ROWS rows, `stride` elements apart and 16-byte aligned; `from` is the tile's
// thread_source. Rows from num_rows and columns from num_columns on are not read and become zero,
// if MISSING includes them. Called by the whole block.
template <int ROWS, int COLUMNS, int THREADS, Missing MISSING>
__device__ __forceinline__ void load_tile(
    u32 tile, const u16* from, i64 stride, int num_rows, int num_columns) {
    constexpr Chunks CHUNKS = COPIES_AT_ONCE ? Chunks::WHOLE : Chunks::ALL;
    load_chunks<ROWS, COLUMNS, THREADS, MISSING, CHUNKS>(
        tile, from, stride, num_rows, num_columns);
    if constexpr (COPIES_AT_ONCE
                  && (MISSING == Missing::COLUMNS || MISSING == Missing::ROWS_AND_COLUMNS))
        if (num_columns % CHUNK_ELEMENTS != 0)              // a branch stops loads: apart
            load_chunks<ROWS, COLUMNS, THREADS, MISSING, Chunks::IN_PART>(
                tile, from, stride, num_rows, num_columns);
}

// The exponent bits of a pair of elements. An element with all its exponent bits set is NaN or
// infinite.
template <typename Element> __device__ __forceinline__ u32 exponent_mask();
template <> __device__ __forceinline__ u32 exponent_mask<float16>() { return 0x7C007C00u; }
template <> __device__ __forceinline__ u32 exponent_mask<bfloat16>() { return 0x7F807F80u; }

// Bit 15 or bit 31 set where the lower or the upper element of the pair is NaN or infinite: adding
// the exponent's lowest bit to a full exponent, and only to that, carries into the sign bit.
template <typename Element> __device__ __forceinline__ u32 nonfinite_bits(u32 pair) {
    constexpr u32 SIGNS = 0x80008000u;
    const u32 exponents = exponent_mask<Element>();
    const u32 lowest = exponents & ~(exponents << 1) & ~SIGNS;
    return ((pair & exponents) + lowest) & SIGNS;
}

// Whether one of the chunks that this thread loaded with load_tile contains a NaN or an infinity.
// Requires the thread's own cp_async_wait, but no barrier. Unrolled by two only, because the
// callers have few registers left.
template <typename Element, int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ bool loaded_nonfinite(u32 tile) {
    u32 found = 0;
    #pragma unroll 2
    for (int i = threadIdx.x; i < num_panels(COLUMNS) * ROWS * 8; i += THREADS) {
        const int row = i / 8 % ROWS;
        const int column = i / 8 / ROWS * PANEL_COLUMNS + i % 8 * CHUNK_ELEMENTS;
        if (COLUMNS % PANEL_COLUMNS != 0 && column >= COLUMNS) continue;
        const uint4 x = load_shared_16(tile + tile_offset<ROWS>(row, column));
        found |= nonfinite_bits<Element>(x.x) | nonfinite_bits<Element>(x.y)
               | nonfinite_bits<Element>(x.z) | nonfinite_bits<Element>(x.w);
    }
    return found != 0;
}

// Stores the first num_columns elements of a chunk; `aligned`: 16 bytes at once where all are
// stored.
__device__ __forceinline__ void store_chunk(u16* to, uint4 chunk, int num_columns, bool aligned) {
    if (aligned && CHUNK_ELEMENTS <= num_columns) {
        *reinterpret_cast<uint4*>(to) = chunk;
    } else {
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        #pragma unroll
        for (int i = 0; i < CHUNK_ELEMENTS; ++i)
            if (i < num_columns) to[i] = static_cast<u16>(words[i / 2] >> (i % 2 * 16));
    }
}

// Copies ROWS rows of a tile of TILE_ROWS rows, from row first_row on, to `target`, whose rows are
// `stride` elements apart: num_columns columns of the first num_rows of them. `aligned`: 16 bytes
// at a time (see rows_aligned). Called by THREADS threads; `thread` is the caller's index.
template <int ROWS, int COLUMNS, int THREADS, int TILE_ROWS>
__device__ __forceinline__ void store_tile(
    u32 tile, int first_row, u16* target, i64 stride, int num_rows, int num_columns, bool aligned,
    int thread) {
    for_each_chunk<ROWS, COLUMNS, THREADS>(thread, [&](int row, int column) {
        if (row >= num_rows) return;
        const uint4 chunk = load_shared_16(tile + tile_offset<TILE_ROWS>(first_row + row, column));
        store_chunk(target + row * stride + column, chunk, num_columns - column, aligned);
    });
}

// Whether all rows are 16-byte aligned, so that they can be stored 16 bytes at a time.
inline bool rows_aligned(const void* pointer, Strides stride) {
    return ((reinterpret_cast<u64>(pointer)
             | stride.batch * 2 | stride.token * 2 | stride.head * 2) & 15) == 0;
}
