// forward.cu: named barriers and SharedPlan.
#pragma once
#include "sm90/alibi_mma.cuh"
#include "sm90/forward_work.cuh"

// ---- Named barriers (0 is __syncthreads) ----

// SCHEDULER_BARRIER + w: consumer warpgroup w may issue its GEMMs. EPILOGUE_BARRIER + w: the GEMMs
// of all its warps have read Q, so its rows of O may overwrite that stage. Only the last query tile
// needs it: for the others, a scheduler barrier comes between the last read of Q and the epilogue.
constexpr int SCHEDULER_BARRIER = 1, SCHEDULER_THREADS =
    (CONSUMER_WARPGROUPS > 1 ? 2 : 1) * WARPGROUP;
constexpr int EPILOGUE_BARRIER = SCHEDULER_BARRIER + CONSUMER_WARPGROUPS;

// ---- Shared memory ----

// Larger heads leave no shared memory for ALiBi's operand (alibi_mma.cuh).
constexpr bool ALIBI_MMA = ALIBI && !SOFTCAP && !BIAS && !SCORE_MOD && WIDEST <= 192;

struct SharedPlan : AlibiKeys<ALIBI_MMA> {
    SmemTile<BLOCK_Q, WIDEST> q_then_out[Q_STAGES];
    SmemTile<BLOCK_K, HEAD_DIM> k[KV_STAGES];
    SmemTile<BLOCK_K, HEAD_DIM_V> v[KV_STAGES];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[KV_STAGES], k_empty[KV_STAGES], v_full[KV_STAGES], v_empty[KV_STAGES];
    WorkTiles work_tiles;
    KeyTileExtras extras;

    __device__ __forceinline__ u32 q_stage(int i) { return shared_address(&q_then_out[i]); }

    // Once, by one thread. *_full: a producer thread arrives and the TMA unit adds a tile's bytes.
    // *_empty: each consumer warp arrives.
    __device__ __forceinline__ void init_barriers() {
        for (int i = 0; i < Q_STAGES; ++i) {
            mbarrier_init(shared_address(&q_full[i]), 1);
            mbarrier_init(shared_address(&q_empty[i]), CONSUMER_WARPS);
        }
        for (int i = 0; i < KV_STAGES; ++i) {
            mbarrier_init(shared_address(&k_full[i]), 1);
            mbarrier_init(shared_address(&k_empty[i]), CONSUMER_WARPS);
            mbarrier_init(shared_address(&v_full[i]), 1);
            mbarrier_init(shared_address(&v_empty[i]), CONSUMER_WARPS);
        }
        work_tiles.init();
        fence_mbarrier_init();
    }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
