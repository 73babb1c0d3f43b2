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

// Whether the calling block is the last of `count` that arrive at a counter; the stores of all of
// them are visible to it then. No block waits for another. Called by the whole block; `shared` is
// in shared memory.
//
// A counter is the number of arrivals in its 16 low bits, if the others are the call's counter_key.
// The memory need not be zeroed before: any other word counts as 0. The last arrival leaves 0, so
// that a kernel that runs again finds no count of its own. The key is random, once per process.
__device__ __forceinline__ bool is_last_to_arrive(
    u64* counter, i64 counter_key, int count, u32& shared) {
    __threadfence();
    __syncthreads();                                        // all of the block's stores
    if (threadIdx.x == 0) {
        u64 expected = 0, seen = 0;
        int arrived;
        do {
            expected = seen;
            arrived = expected >> 16 == u64(counter_key) ? expected & 0xFFFF : 0;
            ++arrived;
            const u64 next = arrived == count ? 0 : u64(counter_key) << 16 | u64(arrived);
            seen = atomicCAS(counter, expected, next);
        } while (seen != expected);
        shared = arrived == count;
        __threadfence();
    }
    __syncthreads();                                        // `shared` is written
    return shared != 0;
}

// A row's state while parts are merged: O, m and the sum of weights, for one column.
template <class Real> struct MergedColumn {
    Real m = -Real(infinity()), sum = 0, out = 0;

    __device__ __forceinline__ void add(Real lse, Real x) {
        if (lse == -Real(infinity())) return;
        const Real m_new = m > lse ? m : lse;
        const Real rescale = m == -Real(infinity()) ? Real(0) : exp(m - m_new);
        const Real weight = exp(lse - m_new);
        sum = sum * rescale + weight;
        out = out * rescale + weight * x;
        m = m_new;
    }
};
