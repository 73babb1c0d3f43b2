// sm90/backward.cu, HAS_PARTS: dK and dV of a key tile are sums over its parts. A part adds its
// sums to those of the parts before it; the last part has the gradients. Parts add in order, so the
// gradients have the same bits in each run.
//
// The sums are floats in global memory, after those of dQ: of each key tile that has parts those of
// its consumers' warps, in the order in which lanes hold them.
#pragma once
#include "common/dq_accum.cuh"
#include "sm90/backward_shared.cuh"

// The PART_SEMAPHORES of a key tile that has parts, one for each warp of consumers; they follow
// recompute_flags. Each holds how many parts have added their sums.
__device__ __forceinline__ int* part_semaphores(const Arguments& args, Part part) {
    return recompute_flag(args, {0, 0, arrays_of(args).shape.batch})
         + part.sums * PART_SEMAPHORES;
}

// Of a lane: four floats side by side, those of a warp's lanes one after another. `sums`: the
// lane's first.
template <int COUNT>
__device__ __forceinline__ void add_sums(float (&gradient)[COUNT], const float* sums) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(sums + i * 32);
        gradient[i] += x.x;
        gradient[i + 1] += x.y;
        gradient[i + 2] += x.z;
        gradient[i + 3] += x.w;
    }
}
template <int COUNT>
__device__ __forceinline__ void store_sums(float* sums, const float (&gradient)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += 4)
        *reinterpret_cast<float4*>(sums + i * 32) =
            make_float4(gradient[i], gradient[i + 1], gradient[i + 2], gradient[i + 3]);
}

// Adds the sums of the parts before this one. Returns whether it is the last part; otherwise the
// sums are left to the next one. By a whole warp of consumers, for its 16 keys.
template <class... Gradients>
__device__ __forceinline__ bool sum_parts(const Arguments&, const TileCoord&, Gradients&...) {
    return true;
}
template <int DK, int DV>
__device__ __forceinline__ bool sum_parts(
    const Arguments& args, const PartTile& work, float (&dk)[DK], float (&dv)[DV]) {
    const Part part = work;
    if (part.parts == 1) return true;
    const Shape& shape = arrays_of(args).shape;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x - WARPGROUP) / 32;
    const int q_tiles = shape.batch * shape.num_heads_q * num_query_tiles(args, BLOCK_Q);
    float* sums = dq_sum_tile(arrays_of(args).dq_sum, q_tiles)
                + (i64(part.sums) * CONSUMER_WARPS + warp) * ((DK + DV) * 32) + lane * 4;
    int* semaphore = part_semaphores(args, part) + warp;
    if (part.part > 0) {
        // The part before has a smaller index and has started: the wait ends (next_index).
        if (lane == 0) while (load_acquire(semaphore) != part.part) {}
        __syncwarp();
        add_sums(dk, sums);
        add_sums(dv, sums + DK * 32);
    }
    if (part.part == part.parts - 1) return true;
    store_sums(sums, dk);
    store_sums(sums + DK * 32, dv);
    __syncwarp();
    if (lane == 0) store_release(semaphore, part.part + 1);  // covers the warp's stores
    return false;
}
