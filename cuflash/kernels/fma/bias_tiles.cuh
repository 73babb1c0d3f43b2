// float biases of a tile, copied to shared memory while products are computed. There they lie in
// the tile of weights: a lane reads its own pairs' biases, and writes P or dS in their places.
#pragma once
#include "common/padded_tiles.cuh"
#include "score/bias.cuh"

constexpr bool STAGES_BIASES = BIAS && sizeof(Bias) == sizeof(float);

// Threads of the calling warp alone.
struct OneWarp {
    static constexpr int COUNT = 32;
    static __device__ __forceinline__ unsigned rank() { return threadIdx.x % 32; }
};

// Starts the copy of the biases of ROWS queries from `query` on and COLUMNS keys from `key` on, 0
// past the arrays' ends, into the next cp.async group. All of Threads.
template <class Threads, int ROWS, int COLUMNS, int PITCH, class Biases>
__device__ __forceinline__ void load_biases(
    float (*rows)[PITCH], const Biases& biases, int query, int key) {
    constexpr int COUNT = Threads::COUNT, CHUNKS = COLUMNS / 4;
    const int num_rows = biases.last_query + 1 - query, num_keys = biases.last_key + 1 - key;
    const i64 row_step = biases.bias_stride_q, key_step = biases.bias_stride_k;
    const auto* first = biases.bias + (query * row_step + key * key_step);
    if (biases.has_quads() && num_rows >= ROWS && num_keys >= COLUMNS) {
        if constexpr (COUNT % CHUNKS == 0 && ROWS * CHUNKS % COUNT == 0) {
            constexpr int STEP = COUNT / CHUNKS;
            const int row = Threads::rank() / CHUNKS, column = Threads::rank() % CHUNKS * 4;
            const u32 target = shared_address(&rows[row][column]);
            first += row * row_step + column;
            #pragma unroll
            for (int i = 0; i < ROWS; i += STEP) {
                cp_async_16(target + i * (PITCH * 4), first);
                first += STEP * row_step;
            }
        } else {
            for (int i = Threads::rank(); i < ROWS * CHUNKS; i += COUNT) {
                const int row = i / CHUNKS, column = i % CHUNKS * 4;
                cp_async_16(shared_address(&rows[row][column]), first + row * row_step + column);
            }
        }
    } else {
        #pragma unroll 2
        for (int i = Threads::rank(); i < ROWS * COLUMNS; i += COUNT) {
            const int row = i / COLUMNS, column = i % COLUMNS;
            const bool exists = row < num_rows && column < num_keys;
            cp_async_4(shared_address(&rows[row][column]),
                       first + (exists ? row * row_step + column * key_step : 0),
                       exists ? 4 : 0);
        }
    }
}
