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
