// The threads that share a piece of work: those of the block, or of some of its warps.
#pragma once
#include "common/ptx.cuh"

struct WholeBlock {
    static __device__ __forceinline__ unsigned rank() { return threadIdx.x; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// WARPS warps from FIRST_WARP on, with a named barrier of their own.
template <int FIRST_WARP, int WARPS, int BARRIER> struct WarpRange {
    static constexpr int COUNT = WARPS * 32;
    static __device__ __forceinline__ unsigned rank() { return threadIdx.x - FIRST_WARP * 32; }
    static __device__ __forceinline__ void sync() { barrier_sync(BARRIER, COUNT); }
};

// The OR of each warp's `bits`, a bool or an int, over WARPS warps, of which the caller's is number
// `warp`. found: shared memory. sync: their barrier; needs another between two calls.
template <class Bits, int WARPS, class Sync>
__device__ __forceinline__ Bits or_over_warps(
    int (&found)[WARPS], int warp, Bits bits, const Sync& sync) {
    if (threadIdx.x % 32 == 0) found[warp] = bits;
    sync();
    Bits any = 0;
    #pragma unroll
    for (int i = 0; i < WARPS; ++i) any |= static_cast<Bits>(found[i]);
    return any;
}
