// P V of many keys, summed in two levels. Tensor cores truncate what they add, so a sum of n terms
// of one sign loses up to n / 10 * 2^-24 of itself (docs/guide/accuracy.md). Where a query may see
// more than 32,768 keys, acc therefore sums RUN_TILES key tiles only. It is then added to LongSums,
// with float additions, which round to nearest, and begins anew.
//
// Constants: RUN_TILES; 0: acc sums all tiles, and nothing here is used.
#pragma once
#include "common/softmax.cuh"

// COUNT elements of a lane, ROWS of its rows. Of four consecutive elements two belong to one row
// and two to the next; COUNT * 2 / ROWS consecutive ones belong to the same two rows.
//
// element(i): acc's i-th. max_scaled: m times c of each row, rounded; acc is relative to it.
template <int COUNT, int ROWS, bool USED = (RUN_TILES > 0)> struct LongSums {
    float* sums = nullptr;                                  // COUNT of them, in local memory
    float reference[ROWS];                                  // m c that sums are relative to
    int num_tiles = 0;                                      // that acc has summed
    bool empty = true;

    // Holds the sums in a local array of the kernel. The compiler must not know which, or it keeps
    // them in registers, which have no room: a run takes a thousand times longer than add(). Not an
    // array of this struct, which makes ptxas serialise wgmma (C7514).
    __device__ __forceinline__ void hold_in(float (&local)[COUNT]) { sums = opaque(local); }

    // Counts a tile that acc has summed. True after the last of a run: then call add().
    __device__ __forceinline__ bool ends_run() { return ++num_tiles == RUN_TILES; }

    // sums = sums rescaled + acc.
    template <class Elements>
    __device__ __forceinline__ void add(Elements element, const float (&max_scaled)[ROWS]) {
        float factors[ROWS];
        rescale(factors, max_scaled);
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float& sum = sums[i];
            sum = empty ? element(i) : fmaf(sum, factors[row_of(i)], element(i));
        }
        num_tiles = 0;
        empty = false;
    }

    // acc += sums rescaled, after the last tile; and begins anew.
    template <class Elements>
    __device__ __forceinline__ void finish(Elements element, const float (&max_scaled)[ROWS]) {
        float factors[ROWS];
        rescale(factors, max_scaled);
        if (!empty)
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                element(i) = fmaf(sums[i], factors[row_of(i)], element(i));
        num_tiles = 0;
        empty = true;
    }

private:
    static __device__ __forceinline__ int row_of(int i) {
        return i / (COUNT * 2 / ROWS) * 2 + i / 2 % 2;
    }
    // Rows that had seen no key before have sums of 0, or NaN, which stays.
    __device__ __forceinline__ void rescale(
        float (&factors)[ROWS], const float (&max_scaled)[ROWS]) {
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float old = reference[row];
            factors[row] = empty || old == -infinity() ? 0.0f : exp2_approx(old - max_scaled[row]);
            reference[row] = max_scaled[row];
        }
    }
};
template <int COUNT, int ROWS> struct LongSums<COUNT, ROWS, false> {
    template <class Local> __device__ __forceinline__ void hold_in(const Local&) {}
    static constexpr bool ends_run() { return false; }
    template <class... Any> __device__ __forceinline__ void add(const Any&...) {}
    template <class... Any> __device__ __forceinline__ void finish(const Any&...) {}
};
