// P V of many keys, summed in two levels. Tensor cores truncate what they add, so a sum of n terms
// of one sign loses up to n / 10 * 2^-24 of itself (docs/guide/accuracy.md). Where a query may see
// more than 32,768 keys, acc therefore sums a run of RUN_TILES key tiles only. It is then added to
// LongSums, with float additions, which round to nearest, and begins anew.
//
// Main loops over tiles stay as they are. A loop over runs encloses them:
//
//     for (;;) {
//         const int last = last_of_run(tile, first);
//         for (; tile >= last; --tile) ...
//         if (!RUN_TILES || tile < first) break;
//         ...                                              // LongSums::add, and acc = 0
//     }
//
// RUN_TILES = 0: acc sums all tiles, and nothing here is used.
#pragma once
#include "common/constants.cuh"
#include "common/softmax.cuh"

// The last tile of the run that begins with `tile`, of those down to `first`.
__device__ __forceinline__ int last_of_run(int tile, int first) {
    return RUN_TILES ? max(tile - (RUN_TILES - 1), first) : first;
}

// COUNT elements of a lane, ROWS of its rows. Of four consecutive elements two belong to one row
// and two to the next; COUNT * 2 / ROWS consecutive ones belong to the same two rows.
//
// All state is in local memory, since main loops use up the registers: COUNT sums, m c of ROWS rows
// that the sums are relative to, and whether a run was added. A run takes a thousand times longer
// than add(). Every 32 elements a __syncwarp() keeps ptxas from loading all sums at once, for which
// registers would be spilled.
//
// element(i): acc's i-th. max_scaled: m times c of each row, rounded; acc is relative to it.
template <int COUNT, int ROWS, bool USED = (RUN_TILES > 0)> struct LongSums {
    static constexpr int SIZE = COUNT + ROWS + 1;
    float* local = nullptr;                                 // SIZE elements

    // Holds the state in an array of the kernel. The compiler must not know which element it uses,
    // or it keeps them in registers. Not an array of this struct, which makes ptxas serialise
    // wgmma (C7514).
    __device__ __forceinline__ void hold_in(float (&array)[SIZE]) {
        local = array;
        clear(local + opaque(0u));
    }

    // sums = sums rescaled + acc.
    template <class Elements>
    __device__ __forceinline__ void add(Elements element, const float (&max_scaled)[ROWS]) {
        float* state = local + opaque(0u);
        float factors[ROWS];
        rescale(factors, state + COUNT, max_scaled);
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i % 32 == 0) __syncwarp();
            state[i] = fmaf(state[i], factors[row_of(i)], element(i));
        }
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) state[COUNT + row] = max_scaled[row];
        state[COUNT + ROWS] = 1.0f;
    }

    // acc += sums rescaled, after the last tile; and begins anew.
    template <class Elements>
    __device__ __forceinline__ void finish(Elements element, const float (&max_scaled)[ROWS]) {
        float* state = local + opaque(0u);
        if (state[COUNT + ROWS] == 0.0f) return;
        float factors[ROWS];
        rescale(factors, state + COUNT, max_scaled);
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i % 32 == 0) __syncwarp();
            element(i) = fmaf(state[i], factors[row_of(i)], element(i));
        }
        clear(state);
    }

private:
    static __device__ __forceinline__ void clear(float* state) {
        #pragma unroll
        for (int i = 0; i < SIZE; ++i)
            state[i] = i >= COUNT && i < COUNT + ROWS ? -infinity() : 0.0f;
    }
    static __device__ __forceinline__ int row_of(int i) {
        return i / (COUNT * 2 / ROWS) * 2 + i / 2 % 2;
    }
    // Rows that had seen no key before have sums of 0, or NaN, which stays.
    static __device__ __forceinline__ void rescale(
        float (&factors)[ROWS], const float* old, const float (&max_scaled)[ROWS]) {
        #pragma unroll
        for (int row = 0; row < ROWS; ++row)
            factors[row] =
                old[row] == -infinity() ? 0.0f : exp2_approx(old[row] - max_scaled[row]);
    }
};
template <int COUNT, int ROWS> struct LongSums<COUNT, ROWS, false> {
    static constexpr int SIZE = 1;
    template <class Local> __device__ __forceinline__ void hold_in(const Local&) {}
    template <class... Any> __device__ __forceinline__ void add(const Any&...) {}
    template <class... Any> __device__ __forceinline__ void finish(const Any&...) {}
};
