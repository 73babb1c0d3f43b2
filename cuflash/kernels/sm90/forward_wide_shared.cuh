// forward_wide.cu: how the head dimensions are divided, and SharedPlan.
#pragma once
#include "sm90/forward_work.cuh"
#include "sm90/wide_heads.cuh"

// Columns of O that a value warpgroup sums.
constexpr int LEFT_COLUMNS = left_columns(HEAD_DIM_V), RIGHT_COLUMNS = HEAD_DIM_V - LEFT_COLUMNS;
template <int COLUMNS> using ValueRing = ChunkRing<BLOCK_K, value_chunk(COLUMNS), STAGES>;

using KeyRing = ChunkRing<BLOCK_K, sum_chunk(HEAD_DIM), KV_STAGES>;

constexpr int P_STAGES = 2;

static_assert(BLOCK_Q == WGMMA_M && Q_STAGES == 1, "a warpgroup's MMA has 64 rows");
static_assert(HEAD_DIM % PANEL_COLUMNS == 0 && HEAD_DIM <= 576, "whole panels");
static_assert(HEAD_DIM_V % PANEL_COLUMNS == 0, "whole panels");
static_assert(HEAD_DIM_V >= 128 && HEAD_DIM_V <= 512, "halves of up to 256 columns");

// What comes with P of a key tile: the factors of acc's rows before P V is added and, with a query
// tile's last key tile, those in the end. max_scaled: as in RowState, with RUN_TILES.
template <bool> struct RowMaxima {
    __device__ __forceinline__ void set_max_scaled(int, float) {}
    __device__ __forceinline__ float max_scaled_of(int) const { return 0.0f; }
};
template <> struct RowMaxima<true> {
    float max_scaled[BLOCK_Q];
    __device__ __forceinline__ void set_max_scaled(int row, float x) { max_scaled[row] = x; }
    __device__ __forceinline__ float max_scaled_of(int row) const { return max_scaled[row]; }
};
struct RowFactors : RowMaxima<(RUN_TILES > 0)> { float rescale[BLOCK_Q], inverse[BLOCK_Q]; };

struct SharedPlan {
    SmemTile<BLOCK_Q, HEAD_DIM> q;
    SmemTile<BLOCK_Q, BLOCK_K> p[P_STAGES];
    KeyRing k;
    ValueRing<LEFT_COLUMNS> v_left;
    ValueRing<RIGHT_COLUMNS> v_right;
    RowFactors factors[P_STAGES];
    u64 q_full[1], q_empty[1], p_full[P_STAGES], p_empty[P_STAGES];
    KeyRing::Barriers k_barriers;
    RingBarriers<STAGES> v_barriers[2];                     // of the left half, of the right one
    WorkTiles work_tiles;
    int inexact[2][ROLE_WARPS];                             // of a half, whether a warp marked rows

    __device__ __forceinline__ u32 q_stage(int) { return shared_address(&q); }

    // Once, by one thread. p_full: each score warp arrives. p_empty: each value warp. q_empty: the
    // score warps after their last read of Q, the value warps after their read of the work tile.
    __device__ __forceinline__ void init_barriers() {
        mbarrier_init(shared_address(q_full), 1);
        mbarrier_init(shared_address(q_empty), 3 * ROLE_WARPS);
        for (int i = 0; i < P_STAGES; ++i) {
            mbarrier_init(shared_address(&p_full[i]), ROLE_WARPS);
            mbarrier_init(shared_address(&p_empty[i]), 2 * ROLE_WARPS);
        }
        k_barriers.init();
        for (RingBarriers<STAGES>& half : v_barriers) half.init();
        work_tiles.init();
        fence_mbarrier_init();
    }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");
