// Tiles of floats or doubles in shared memory, and rows of them in global memory, 16 bytes at a
// time.
#pragma once
#include "common/constants.cuh"
#include "common/softmax.cuh"
#include "common/thread_groups.cuh"

constexpr int THREADS = NUM_WARPS * 32;
struct AllThreads : WholeBlock { static constexpr int COUNT = THREADS; };
constexpr int CHUNK = 16 / sizeof(Element);                 // elements in 16 bytes

// Rows are padded, so that the same columns of neighbouring rows lie in different banks.
constexpr int ROWS_PAD = 4;

template <int ROWS, int COLUMNS, int PAD = ROWS_PAD> struct alignas(16) SmemTile {
    static_assert(COLUMNS % CHUNK == 0 && PAD % CHUNK == 0, "whole chunks");
    Element at[ROWS][COLUMNS + PAD];
};

// ---- Chunks ----

template <class T> struct ChunkOf { using type = double2; };
template <> struct ChunkOf<float> { using type = float4; };
using Chunk = ChunkOf<Element>::type;

__device__ __forceinline__ Chunk chunk_at(const Element* x) {
    return *reinterpret_cast<const Chunk*>(x);
}
__device__ __forceinline__ double number(const double2& x, int i) { return i == 0 ? x.x : x.y; }
__device__ __forceinline__ float number(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
__device__ __forceinline__ double2 chunk_of(const double (&x)[2]) {
    return make_double2(x[0], x[1]);
}
__device__ __forceinline__ float4 chunk_of(const float (&x)[4]) {
    return make_float4(x[0], x[1], x[2], x[3]);
}

// ---- Global memory ----

// Where one head of an array (batch, seqlen, heads, columns) begins.
__device__ __forceinline__ const Element* head_start(
    const void* array, const Strides& stride, int batch, int head) {
    return static_cast<const Element*>(array) + batch * stride.batch + head * stride.head;
}

// Which chunks a pass over a tile copies; CUT: those that the end of a row cuts.
enum class Pass { ALL, WHOLE, CUT };

// A pass of load_tile.
template <Pass PASS, class Threads, int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ void load_chunks(
    SmemTile<ROWS, COLUMNS, PAD>& tile, const Element* source, i64 stride, int num_rows,
    int num_columns) {
    constexpr int CHUNKS = COLUMNS / CHUNK, BYTES = sizeof(Element), COUNT = Threads::COUNT;
    const auto valid = [&](int column) {
        const int bytes = min(max(num_columns - column, 0), CHUNK) * BYTES;
        if (PASS == Pass::WHOLE) return bytes == 16 ? 16 : 0;
        return bytes;
    };
    if constexpr (COUNT % CHUNKS == 0 && ROWS * CHUNKS % COUNT == 0) {
        constexpr int STEP = COUNT / CHUNKS, PITCH = (COLUMNS + PAD) * BYTES;
        const int row = Threads::rank() / CHUNKS, column = Threads::rank() % CHUNKS * CHUNK;
        const int bytes = valid(column);
        if (PASS == Pass::CUT && bytes % 16 == 0) return;
        const u32 target = shared_address(&tile.at[row][column]);
        source += row * stride + column;
        #pragma unroll (PASS == Pass::CUT ? 1 : 8)
        for (int first = 0; first < ROWS; first += STEP) {
            cp_async_16_partly(
                target + first * PITCH, source, first + row < num_rows ? bytes : 0);
            source += STEP * stride;
        }
    } else {
        #pragma unroll (PASS == Pass::CUT ? 1 : 4)
        for (int i = Threads::rank(); i < ROWS * CHUNKS; i += Threads::COUNT) {
            const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
            if (PASS == Pass::CUT && valid(column) % 16 == 0) continue;
            cp_async_16_partly(
                shared_address(&tile.at[row][column]), source + row * stride + column,
                row < num_rows ? valid(column) : 0);
        }
    }
}

// Starts the copy of ROWS rows, `stride` elements apart and 16-byte aligned. Rows from num_rows and
// columns from num_columns on are not read and become zero. All of Threads:
// thread i copies the chunks i, i + COUNT and so on, which have the same columns if COUNT is a
// multiple of a row's chunks. Where copies are complete at once, a branch between two loads makes
// the second wait for the first: cut chunks, which need one, are apart.
template <class Threads = AllThreads, int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ void load_tile(
    SmemTile<ROWS, COLUMNS, PAD>& tile, const Element* source, i64 stride, int num_rows,
    int num_columns) {
    constexpr Pass FIRST = COPIES_AT_ONCE ? Pass::WHOLE : Pass::ALL;
    load_chunks<FIRST, Threads>(tile, source, stride, num_rows, num_columns);
    if constexpr (COPIES_AT_ONCE)
        if (num_columns % CHUNK != 0)
            load_chunks<Pass::CUT, Threads>(tile, source, stride, num_rows, num_columns);
}

// load_tile with code of its own for whole tiles: three instructions a chunk instead of ten.
template <class Threads = AllThreads, int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ void load_tile_or_whole(
    SmemTile<ROWS, COLUMNS, PAD>& tile, const Element* source, i64 stride, int num_rows,
    int num_columns) {
    constexpr int CHUNKS = COLUMNS / CHUNK, COUNT = Threads::COUNT;
    constexpr int PITCH = (COLUMNS + PAD) * sizeof(Element);
    if constexpr (COUNT % CHUNKS == 0 && ROWS * CHUNKS % COUNT == 0)
        if (num_rows >= ROWS && num_columns == COLUMNS) {
            constexpr int STEP = COUNT / CHUNKS;
            const int row = Threads::rank() / CHUNKS, column = Threads::rank() % CHUNKS * CHUNK;
            const u32 target = shared_address(&tile.at[row][column]);
            source += row * stride + column;
            #pragma unroll
            for (int first = 0; first < ROWS; first += STEP) {
                cp_async_16(target + first * PITCH, source);
                source += STEP * stride;
            }
            return;
        }
    load_tile<Threads>(tile, source, stride, num_rows, num_columns);
}

// Whether one of the chunks that this thread itself loaded with load_tile holds a NaN or an
// infinity. Needs the thread's own cp_async_wait, no barrier.
template <class Threads = AllThreads, int ROWS, int COLUMNS, int PAD>
__device__ __forceinline__ bool loaded_nonfinite(const SmemTile<ROWS, COLUMNS, PAD>& tile) {
    constexpr int CHUNKS = COLUMNS / CHUNK;
    bool found = false;
    for (int i = Threads::rank(); i < ROWS * CHUNKS; i += Threads::COUNT) {
        const Chunk x = chunk_at(&tile.at[i / CHUNKS][i % CHUNKS * CHUNK]);
        #pragma unroll
        for (int c = 0; c < CHUNK; ++c) found |= !(fabs(number(x, c)) < infinity());
    }
    return found;
}

// Writes CHUNK neighbouring elements to a row of num_columns columns.
__device__ __forceinline__ void store_chunk(
    Element* row, int column, int num_columns, bool aligned, const Element (&x)[CHUNK]) {
    if (aligned && column + CHUNK <= num_columns) {
        *reinterpret_cast<Chunk*>(row + column) = chunk_of(x);
        return;
    }
    #pragma unroll
    for (int c = 0; c < CHUNK; ++c)
        if (column + c < num_columns) row[column + c] = x[c];
}

// Whether rows can be written 16 bytes at a time: all of them are 16-byte aligned.
__device__ __forceinline__ bool rows_aligned(const void* pointer, const Strides& stride) {
    constexpr i64 BYTES = sizeof(Element);
    return ((reinterpret_cast<u64>(pointer)
             | stride.batch * BYTES | stride.token * BYTES | stride.head * BYTES) & 15) == 0;
}
