// decode/forward_sm90.cu: named barriers, SharedPlan.
#pragma once
#include "decode/row_tile.cuh"
#include "sm90/consumer_constants.cuh"
#include "sm90/pipeline.cuh"

// ---- Named barriers (0 is __syncthreads) ----

// SCHEDULER_BARRIER + w: consumer warpgroup w may issue its GEMMs. QUERY_BARRIER + w: all its warps
// have read, or loaded, their rows of Q.
constexpr int SCHEDULER_BARRIER = 1, SCHEDULER_THREADS =
    (CONSUMER_WARPGROUPS > 1 ? 2 : 1) * WARPGROUP;
constexpr int QUERY_BARRIER = SCHEDULER_BARRIER + CONSUMER_WARPGROUPS;

// ---- Shared memory ----

constexpr int PRODUCER_WARPS = 4;

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_K, HEAD_DIM> k[KV_STAGES];
    SmemTile<BLOCK_K, HEAD_DIM_V> v[KV_STAGES];
    u64 k_full[KV_STAGES], k_empty[KV_STAGES], v_full[KV_STAGES], v_empty[KV_STAGES];
    // Of a partly masked tile: whether each producer warp replaced numbers of V. With v_full.
    u32 replaced[KV_STAGES][PRODUCER_WARPS];

    // Once, by one thread. *_full: each producer thread arrives. *_empty: each consumer warp does.
    __device__ __forceinline__ void init_barriers() {
        for (int i = 0; i < KV_STAGES; ++i) {
            mbarrier_init(shared_address(&k_full[i]), WARPGROUP);
            mbarrier_init(shared_address(&k_empty[i]), CONSUMER_WARPS);
            mbarrier_init(shared_address(&v_full[i]), WARPGROUP);
            mbarrier_init(shared_address(&v_empty[i]), CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
