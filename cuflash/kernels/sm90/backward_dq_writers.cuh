// The writer warps of sm90/backward.cu: one for each consumer's part of dQ, which it adds to the
// sums in global memory once an iteration.
#pragma once
#include "sm90/backward_integer_dq.cuh"
#include "sm90/backward_shared.cuh"

// Query tiles of a head that share a semaphore: a writer warp fences each store with release
// semantics, and waits for each acquired one. Under a WINDOW the key tile before may see one of two
// query tiles and not the other.
constexpr int DQ_INTERVAL = WINDOW ? 1 : 2;

// If DETERMINISTIC, key tiles add in the order of their ranks. The warp acquires the semaphore
// before the consumer is done, and releases it after the consumer has gone on, so that neither
// delays the consumer.
__device__ __forceinline__ void add_dq(const Arguments& args, SharedPlan& shared, int consumer) {
    const int lane = threadIdx.x % 32;
    const u32 part = shared_address(&shared.staging[consumer]);
    for_each_iteration<DQ_INTERVAL>(args, shared, [&](DqAddition at) {
        int* semaphore = dq_semaphores(args, at.semaphore) + consumer;
        if constexpr (DETERMINISTIC) {
            // Predecessors have smaller indices and have started: the wait ends (next_index).
            if (at.acquires && lane == 0) while (load_acquire(semaphore) != at.rank) {}
            __syncwarp();
        }
        barrier_sync(DQ_FULL + consumer, DQ_THREADS);
        if (lane == 0) {
            bulk_reduce_add(
                dq_sum_tile(args.arrays.dq_sum, at.query_tile) + consumer * (DQ_PART_BYTES / 4),
                part, DQ_PART_BYTES);
            tma_store_commit();
            tma_store_wait_read<0>();
        }
        __syncwarp();
        barrier_arrive(DQ_EMPTY + consumer, DQ_THREADS);
        if constexpr (DETERMINISTIC) {
            if (at.releases && lane == 0) {
                tma_store_wait<0>();                        // all additions since the last release
                store_release(semaphore, at.rank + 1);
            }
            __syncwarp();
        }
    });
    tma_store_wait<0>();
}

// The same, INTEGER_DQ. Wide tiles have two limbs, which the consumer stages one after the other.
__device__ __forceinline__ void add_integer_dq(
    const Arguments& args, SharedPlan& shared, int consumer) {
    const int lane = threadIdx.x % 32;
    const u32 part = shared_address(&shared.staging[consumer]);
    for_each_iteration<1>(args, shared, [&](DqAddition at) {
        int* sums = reinterpret_cast<int*>(dq_sum_tile(args.arrays.dq_sum, at.query_tile))
                  + consumer * (DQ_PART_BYTES / 4);
        for (bool has_low = is_wide(args, at.query_tile);; has_low = false) {
            barrier_sync(DQ_FULL + consumer, DQ_THREADS);
            if (lane == 0) {
                bulk_reduce_add_s32(sums, part, DQ_PART_BYTES);
                tma_store_commit();
                tma_store_wait_read<0>();
            }
            __syncwarp();
            barrier_arrive(DQ_EMPTY + consumer, DQ_THREADS);
            if (!has_low) break;
            sums += low_sums_distance(args);
        }
    });
    tma_store_wait<0>();
}
