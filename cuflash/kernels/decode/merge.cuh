// Merging the parts of a row tile that several blocks computed. Each block leaves O and lse of its
// part in float, in its slot; the block that comes last merges all, in their order:
//
//     m = max_i lse_i,  w_i = exp(lse_i - m),  O = sum_i w_i O_i / sum_i w_i,
//     lse = m + log(sum_i w_i)
//
// and adds the head's sink to the sum. A part with lse = inf makes the weights NaN and lse inf; one
// with lse = -inf has no visible key and takes no part.
//
// Real: float, or double for kernels of double.
#pragma once
#include "common/softmax.cuh"
#include "decode/parts.cuh"

// How many of a row tile's parts have been stored, in the 16 low bits of a word whose other bits are
// the call's key: random, once per process. The word need not be zeroed before: each block calls
// start() before it arrives, and a word without the key becomes a count of 0. The last arrival
// leaves 0, for a kernel that runs again. No block waits for another.
struct PartCounter {
    u64 *word, zero;

    template <class Arguments>
    __device__ __forceinline__ PartCounter(const Arguments& args, const Part& part)
        : word(args.part_counters + part.counter), zero(u64(args.counter_key) << 16) {}

    // Called by one thread of each block.
    __device__ __forceinline__ void start() const {
        const u64 seen = *static_cast<const volatile u64*>(word);
        if (seen >> 16 != zero >> 16) atomicCAS(word, seen, zero);
    }
    // Whether the calling block is the last of `count`; the stores of all of them are visible to it
    // then. Called by the whole block; `shared` is in shared memory.
    __device__ __forceinline__ bool is_last_of(int count, u32& shared) const {
        __syncthreads();                                    // the block's stores precede the fence
        if (threadIdx.x == 0) {
            __threadfence();
            shared = atomicAdd(word, u64(1)) == zero + (count - 1);
            if (shared) *word = zero;
            __threadfence();
        }
        __syncthreads();                                    // `shared` is written
        return shared != 0;
    }
};

template <class Real> __device__ __forceinline__ Real warp_max(Real x) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const Real other = __shfl_xor_sync(WHOLE_WARP, x, distance);
        x = other > x ? other : x;
    }
    return x;
}
template <class Real> __device__ __forceinline__ Real warp_sum(Real x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// A row's state while a warp merges its parts: m, the sum of weights, and O in COLUMNS columns of
// each lane, relative to m.
template <class Real, int COLUMNS> struct MergedRow {
    Real m = -Real(infinity()), sum = 0, out[COLUMNS] = {};

    // Adds the parts of as many lanes as there are. lse, of the lane's part, is -inf if there is
    // none; out_of(part, i) is the lane's i-th column of O.
    template <class OutOf> __device__ __forceinline__ void add(int parts, Real lse, OutOf out_of) {
        const Real highest = warp_max(lse), m_new = highest > m ? highest : m;
        const Real rescale = m == -Real(infinity()) ? Real(0) : exp(m - m_new);
        const Real weight = lse == -Real(infinity()) ? Real(0) : exp(lse - m_new);
        sum = sum * rescale + warp_sum(weight);
        m = m_new;
        #pragma unroll
        for (Real& element : out) element *= rescale;
        #pragma unroll 8                                    // loads under way together
        for (int part = 0; part < parts; ++part) {
            const Real w = __shfl_sync(WHOLE_WARP, weight, part);
            #pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                const Real x = out_of(part, i);
                out[i] += w == 0 ? Real(0) : w * x;
            }
        }
    }
};
