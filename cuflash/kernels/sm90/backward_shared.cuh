// Shared memory and barriers of sm90/backward.cu.
//
// mbarriers. *_full: from the TMA unit to the consumers, one arrival of a producer thread and the
// tile's bytes. *_empty: back, an arrival of each consumer warp. ds_full, ds_empty: among consumer
// warps, an arrival of each. work_*: backward_scheduler.cuh.
// Named barriers (0 is __syncthreads), one of each for consumer warpgroup g. DQ_FULL + g: its part
// of dQ is in the staging buffer. DQ_EMPTY + g: the writer warp has read it. CONSUMER_SYNC + g: its
// warps meet.
//
// DOUBLE_BUFFERED_K: where a tile has few iterations, the time between tiles counts. K then has two
// stages, and V is released after its last matmul, so the next tile's K and V are there when it
// begins. A tile's end does not wait until the stores of dK and dV have read shared memory: dK is
// stored through K's stage, dV through the staging buffer of dQ.
#pragma once
#include "sm90/backward_producer.cuh"
#include "sm90/row_stats.cuh"

constexpr int CONSUMERS = BLOCK_K / 64;                     // warpgroups
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP, CONSUMER_WARPS = CONSUMER_THREADS / 32;
constexpr int DQ_PART_BYTES = BLOCK_Q * HEAD_DIM * 4 / CONSUMERS;    // a warpgroup's, in float

constexpr int DQ_FULL = 2, DQ_EMPTY = 4, CONSUMER_SYNC = 6, DQ_THREADS = WARPGROUP + 32;

// K and V of a work tile. If K has two stages, the WorkState gives K's stage and phase.
template <bool> struct KeyTileStages {
    static constexpr int K_STAGES = 1;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    __device__ __forceinline__ u32 k_tile(WorkState) { return shared_address(&k); }
};
template <> struct KeyTileStages<true> {
    static constexpr int K_STAGES = 2;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_K, HEAD_DIM> second_k;
    __device__ __forceinline__ u32 k_tile(WorkState state) {
        return shared_address(&k) + state.stage() * static_cast<u32>(sizeof k + sizeof v);
    }
};

// The barriers that a second stage of K needs. k_empty: as *_empty above. k_read: each consumer
// warp arrives when it has read the tile's K; then dK may overwrite it.
template <bool> struct KeyTileBarriers {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void release_previous_k(WorkState, bool) {}
    __device__ __forceinline__ void arrive_k_read(bool) {}
    __device__ __forceinline__ void wait_k_read(WorkState) {}
};
template <> struct KeyTileBarriers<true> {
    u64 k_empty[2], k_read;
    __device__ __forceinline__ void init() {
        for (u64& barrier : k_empty) mbarrier_init(shared_address(&barrier), CONSUMER_WARPS);
        mbarrier_init(shared_address(&k_read), CONSUMER_WARPS);
    }
    __device__ __forceinline__ void wait_k_empty(WorkState state) {
        mbarrier_wait(shared_address(&k_empty[state.stage()]), state.phase() ^ 1);
    }
    // Of the work tile before this one.
    __device__ __forceinline__ void release_previous_k(WorkState state, bool arrives) {
        mbarrier_arrive_if(
            arrives && state.count > 0, shared_address(&k_empty[state.stage() ^ 1]));
    }
    __device__ __forceinline__ void arrive_k_read(bool arrives) {
        mbarrier_arrive_if(arrives, shared_address(&k_read));
    }
    __device__ __forceinline__ void wait_k_read(WorkState state) {
        mbarrier_wait(shared_address(&k_read), state.kv_phase());
    }
};

// The barriers of OWNED_DQ (backward_owned_dq.cuh): a sum of dQ is in a consumer's staging buffer.
template <bool> struct OwnedDqBarriers {
    __device__ __forceinline__ void init_owned_dq() {}
    __device__ __forceinline__ u32 sum_loaded(int) { return 0; }
};
template <> struct OwnedDqBarriers<true> {
    u64 loaded[CONSUMERS];
    __device__ __forceinline__ void init_owned_dq() {
        for (u64& barrier : loaded) mbarrier_init(shared_address(&barrier), 1);
    }
    __device__ __forceinline__ u32 sum_loaded(int consumer) {
        return shared_address(&loaded[consumer]);
    }
};

struct SharedTiles : KeyTileStages<DOUBLE_BUFFERED_K> {
    SmemTile<BLOCK_Q, HEAD_DIM> q[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> ds[2];                       // dS^T
    alignas(1024) unsigned char staging[CONSUMERS][DQ_PART_BYTES];   // dQ; then dV, dK
    QueryRows rows[STAGES];
    u64 q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    u64 ds_full[2], ds_empty[2];
    u64 k_full[K_STAGES], v_full, kv_empty;
    u64 work_full[WORK_STAGES], work_empty[WORK_STAGES];
    WorkTile work_tiles[WORK_STAGES];
    int has_boundary[BOUNDARY_FLAGS];
};
struct SharedPlan : SharedTiles, KeyTileBarriers<DOUBLE_BUFFERED_K>, OwnedDqBarriers<OWNED_DQ> {};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_barriers(SharedPlan& shared) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared_address(&shared.q_full[i]), 1);
        mbarrier_init(shared_address(&shared.q_empty[i]), CONSUMER_WARPS);
        mbarrier_init(shared_address(&shared.dout_full[i]), 1);
        mbarrier_init(shared_address(&shared.dout_empty[i]), CONSUMER_WARPS);
    }
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared_address(&shared.ds_full[i]), CONSUMER_WARPS);
        mbarrier_init(shared_address(&shared.ds_empty[i]), CONSUMER_WARPS);
    }
    for (u64& barrier : shared.k_full) mbarrier_init(shared_address(&barrier), 1);
    mbarrier_init(shared_address(&shared.v_full), 1);
    mbarrier_init(shared_address(&shared.kv_empty), CONSUMER_WARPS);
    for (int i = 0; i < WORK_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.work_full[i]), 1);
        // consumer warps, dQ writer warps, the K/V producer
        mbarrier_init(shared_address(&shared.work_empty[i]), CONSUMER_WARPS + CONSUMERS + 1);
    }
    shared.init();
    shared.init_owned_dq();
    fence_mbarrier_init();
}
